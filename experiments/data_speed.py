"""The data pipeline: tokenizing beside the bare library, batching on one core.

    python -m experiments.data_speed [--tokenizer VOCABULARY] [--megabytes 48] [--length 4096] [--json]

The text is the standard library of this Python, repeated as needed; the vocabulary is the user's, or one that
is trained on it first. Everything is written to a temporary folder and removed.
"""

import argparse
import json
import os
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from experiments.measurements import Measurement, document, table
from gss.bench.machine import median_seconds
from gss.data import Batches, Lanes, Packed, Segments, Tokenizer, load_tokenizer, open_dataset, prepare
from gss.data.tokenizer import ByteTokenizer, JsonTokenizer, SentencePieceTokenizer
from gss.data.tokenizer_training import train_tokenizer

WAYS: dict[str, type[Segments] | type[Lanes] | type[Packed]] = {"segments": Segments, "lanes": Lanes, "packed": Packed}


def bench_data(
    tokenizer: str | None = None,
    megabytes: int = 48,
    length: int = 4096,
    batch_size: int = 32,
    *,
    repeats: int = 3,
    report: Callable[[str], None] = lambda text: None,
) -> list[Measurement]:
    """Measure everything in one run; speeds compare in it, whatever else the machine is doing."""
    with tempfile.TemporaryDirectory(prefix="gss-bench-") as folder:
        root = Path(folder)
        report("writing text")
        (root / "corpus").mkdir()
        modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = "".join(path.read_text(encoding="utf-8", errors="ignore") for path in modules)
        for number in range(megabytes):
            _write(root / "corpus" / f"{number}.txt", text, 10**6, number)
        report("making a vocabulary")
        if tokenizer is not None:
            vocabulary = load_tokenizer(tokenizer)
        else:
            sample = [str(root / "corpus")]
            vocabulary = train_tokenizer(sample, root / "vocabulary", vocab_size=8000, max_bytes=2_000_000)
        rows = _tokenising(root, vocabulary, repeats, report)
        report("batching")
        dataset = open_dataset(root / "prepared", verify=False)
        for name, way in WAYS.items():
            rate = _tokens_per_second(way(dataset, length, min(batch_size, len(dataset))), seconds=1.0)
            rows.append(Measurement(f"batching, {name}, L={length}", rate / 1e6, "million tokens/s"))
        return rows


def _write(path: Path, text: str, size: int, number: int) -> None:
    """A document of about `size` characters, from another place of the text for each number."""
    start = text.find("\n", number * (1 << 20) % len(text)) + 1
    turned = text[start:] + text[:start]
    with open(path, "w", encoding="utf-8") as file:
        file.write(f"document {number}\n")
        for written in range(0, size, len(turned)):
            file.write(turned[: size - written])


def _tokenising(root: Path, tokenizer: Tokenizer, repeats: int, report: Callable[[str], None]) -> list[Measurement]:
    """`gss prepare` from files to finished shards beside the library's encode on texts in memory."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((root / "corpus").iterdir())]
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    rows = []
    for workers in sorted({1, os.cpu_count() or 1}):
        report(f"tokenising on {workers} core(s)")

        def ours(workers: int = workers) -> None:
            prepare([str(root / "corpus")], root / "prepared", tokenizer, workers=workers, force=True, valid=0)

        with mock.patch.dict(os.environ, TOKENIZERS_PARALLELISM="true" if workers > 1 else "false"):
            seconds = median_seconds({"ours": ours, "bare": bare_encoder(tokenizer, texts, workers)}, repeats)
        bare, what = "the bare library's encode", f"{tokenizer.kind}, {workers} core(s)"
        rate = Measurement(f"prepare, {what}", megabytes / seconds["ours"], "MB/s")
        rows += [
            rate.beside(bare, megabytes / seconds["bare"]),
            Measurement(f"{bare}, {what}", megabytes / seconds["bare"], "MB/s"),
        ]
    return rows


def bare_encoder(tokenizer: Tokenizer, texts: list[str], threads: int) -> Callable[[], Any]:
    """The library that a vocabulary comes from, called as its users do, with nothing of ours around it."""
    if isinstance(tokenizer, SentencePieceTokenizer):
        import sentencepiece

        processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.content)
        return lambda: processor.encode(texts, num_threads=threads)
    if isinstance(tokenizer, JsonTokenizer):
        import tokenizers

        bare = tokenizers.Tokenizer.from_str(tokenizer.content.decode())
        return lambda: [encoding.ids for encoding in bare.encode_batch(texts, add_special_tokens=False)]
    assert isinstance(tokenizer, ByteTokenizer)
    return lambda: [list(text.encode()) for text in texts]


def _tokens_per_second(batches: Batches, seconds: float) -> float:
    """Tokens in rows, padding included, that `batch` delivers per second on this thread."""
    batches.batch(0)
    step, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        batches.batch(step)
        step += 1
    return step * batches.batch_size * batches.length / (time.perf_counter() - started)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", help="a vocabulary; by default one is trained on the spot")
    parser.add_argument("--megabytes", type=int, default=48)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sizes = (options.megabytes, options.length, options.batch_size)
    rows = bench_data(options.tokenizer, *sizes, repeats=options.repeats, report=print)
    found = document(rows)
    print(json.dumps(found, indent=1, ensure_ascii=False) if options.json else table(rows))


if __name__ == "__main__":
    main()
