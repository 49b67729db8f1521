"""Run folders without training, and no network: what these tests read is on the disk."""

import json
import os
from pathlib import Path

import pytest
import torch

import gss
from gss.config import to_mapping
from gss.data import Tokenizer, load_tokenizer
from gss.io.checkpoint import save
from tests.conftest import small_config

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

TEXTS = [
    "",
    "Hello, world!",
    " leading and trailing ",
    "two\nlines\n\n\nand\ttabs\r\n",
    "a  b    c\u00a0d\u3000e",
    "naïve café, e\u0301 ﬁ Ａ ① ½",
    "Привет, 世界! こんにちは 한국어 مرحبا שלום हिन्दी ไทย",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 \U0001f702 ꧁",
    "▁already▁marked ▁ x",
    "</s> <|endoftext|> <eos> [SEP] <s> <unk>",
    "\x00\x01\x7f\x80\u200b\ufeff\ufffd",
    "def f(x):\n    return {x: 1234567890.00}  # comment\n",
]
"""What tokenizers trip over."""


def write_run(folder: Path, model: gss.LanguageModel, tokenizer: Tokenizer, step: int = 7) -> Path:
    """What of a run folder loading needs, and what a model card tells of."""
    folder.mkdir(parents=True)
    config = {"preset": "gss-tiny", "length": 128, "batch_tokens": 1024, "model": to_mapping(model.config)}
    (folder / "config.json").write_text(json.dumps(config))
    data = {"hash": "f00d" * 16, "tokens": 5000, "documents": 12, "folder": "/somewhere/private"}
    (folder / "data.json").write_text(json.dumps(data))
    tokenizer.save(folder / "tokenizer")
    save(folder / "checkpoints", step, {"model": model.state_dict()}, {})
    return folder


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid on bytes."""
    torch.manual_seed(0)
    model = gss.build_model(small_config("gss-hybrid", vocab_size=257, **{"attention.chunk": 8}))
    return write_run(tmp_path_factory.mktemp("hf") / "run", model, load_tokenizer("bytes"))
