"""Long-range language models built on Gated State Spaces."""

__version__ = "0.1.0"
