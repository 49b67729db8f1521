"""Run folders without training, and no network: what these tests read is on the disk."""

import json
import os
from pathlib import Path

import pytest
import torch

import gss
from tests.conftest import small_config
from tests.making import save_run

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


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid on bytes."""
    torch.manual_seed(0)
    model = gss.build_model(small_config("gss-hybrid", vocab_size=257, **{"attention.chunk": 8}))
    run = save_run(model, tmp_path_factory.mktemp("hf") / "run", step=7, length=128, batch_tokens=1024)
    data = {"hash": "f00d" * 16, "tokens": 5000, "documents": 12, "folder": "/somewhere/private"}
    (run / "data.json").write_text(json.dumps(data))
    return run
