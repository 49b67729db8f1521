"""From text to batches of token ids; knows nothing of models."""
