"""Describe: what `gss data` shows of a prepared corpus, as plain values; the command line draws them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gss.data.manifest import Manifest, read_manifest
from gss.data.shards import Dataset, open_dataset
from gss.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class HistogramBar:
    """Documents with lengths in [low, high), and the tokens that they hold."""

    low: int
    high: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class SplitDescription:
    """One split: the manifest's facts, the lengths of its documents and the start of one of them."""

    name: str
    facts: dict[str, Any]
    histogram: list[HistogramBar]
    median_length: int
    sample_name: str
    sample_text: str


@dataclass(frozen=True)
class Description:
    """A corpus whose hashes were verified."""

    folder: Path
    manifest: Manifest
    tokenizer: Tokenizer
    splits: list[SplitDescription]


def describe(folder: str | Path, *, sample: int = 0, sample_tokens: int = 120) -> Description:
    """Open every split of a corpus, verify all of it, and gather what a person wants to know."""
    manifest = read_manifest(folder)
    datasets = {split: open_dataset(folder, split) for split in manifest.splits}
    tokenizer = next(iter(datasets.values())).tokenizer()
    splits = [_describe_split(dataset, tokenizer, sample, sample_tokens) for dataset in datasets.values()]
    return Description(Path(folder), manifest, tokenizer, splits)


def _describe_split(dataset: Dataset, tokenizer: Tokenizer, sample: int, sample_tokens: int) -> SplitDescription:
    assert dataset.manifest is not None
    document = dataset.document(sample % len(dataset))
    return SplitDescription(
        dataset.split,
        dataset.manifest.splits[dataset.split],
        length_histogram(dataset),
        int(np.median(dataset.lengths)),
        document.name,
        tokenizer.decode(document.tokens[:sample_tokens]),
    )


def length_histogram(dataset: Dataset) -> list[HistogramBar]:
    """Documents by length in powers of two, from the shortest length that occurs to the longest."""
    lengths = dataset.lengths
    # frexp's exponent is exact for every length: lengths in [2^(e-1), 2^e) have exponent e.
    exponents = np.frexp(lengths.astype(np.float64))[1]
    bars = []
    for exponent in range(int(exponents.min()), int(exponents.max()) + 1):
        inside = exponents == exponent
        bars.append(HistogramBar(1 << (exponent - 1), 1 << exponent, int(inside.sum()), int(lengths[inside].sum())))
    return bars
