"""Looks at a model in training: its loss on the validation split, and a sample of its text.

The only place where training meets `gss.evaluate` and `gss.generate`.
"""

import torch

from gss.data import Dataset, open_dataset
from gss.model import LanguageModel
from gss.train.config import TrainConfig

VALIDATION = "valid"


def evaluate(
    model: LanguageModel, training: Dataset, config: TrainConfig, device: torch.device
) -> dict[int, float] | None:
    """The mean loss a token at each length; None when the data has no validation split."""
    from gss.evaluate import evaluate

    if training.folder is None or training.manifest is None or VALIDATION not in training.manifest.splits:
        return None
    lengths = config.report.evaluate_lengths or (config.length,)
    dataset = open_dataset(training.folder, VALIDATION, verify=False)
    result = evaluate(model, dataset, lengths=lengths, max_tokens=config.report.evaluate_tokens, device=device)
    return {row.length: row.loss for row in result.rows}


def sample(model: LanguageModel, training: Dataset, config: TrainConfig) -> str:
    """A text that goes on from the prompt."""
    from gss.generate import generate

    report = config.report
    return generate(
        model, training.tokenizer(), report.sample_prompt, max_tokens=report.sample_tokens, seed=config.seed
    )
