"""Files from elsewhere, mutated: each gives a clear error or a sound result, within bounds, and touches nothing else.

`make soak` runs 10,000 of them; GSS_FUZZ names another number and GSS_FUZZ_SEED another seed. `make test` runs a few.
"""

import contextlib
import gzip
import importlib.util
import io
import json
import multiprocessing
import os
import random
import signal
import tarfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gss
from gss.data import Lanes, Packed, Segments, SourceOptions, load_tokenizer, open_dataset, prepare
from gss.io.runs import read_metrics
from gss.training.folder import RunFolder
from tests.conftest import posix, small_config
from tests.making import save_run
from tests.mutating import fresh_copy, mutate

EXPORTS = importlib.util.find_spec("transformers") is not None
if EXPORTS:
    from gss import hf

pytestmark = posix  # alarms, and limits on memory

SECONDS, BYTES = 10, 1 << 30
SIZES = {"vocab_size": 257, "depth": 2}


def make_originals(root: Path) -> None:
    """One sound folder of each kind."""
    draw = random.Random(0)
    text = root / "text"
    text.mkdir(parents=True)
    for number in range(6):
        (text / f"{number}.txt").write_text(" ".join(draw.choices(["wort", "word", "mot"], k=60)) + "\n")
    sources = root / "sources"
    sources.mkdir()
    rows = [json.dumps({"text": f"row {number} of the lines", "id": number}) for number in range(20)]
    (sources / "rows.jsonl").write_text("\n".join(rows) + "\n")
    (sources / "more.txt.gz").write_bytes(gzip.compress(b"compressed text\n" * 50))
    (sources / "plain.txt").write_text("plain text\n" * 50)
    articles = root / "articles"
    articles.mkdir()
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in {"main.tex": b"\\documentclass{a}\\input{s}", "s.tex": b"a section"}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    (articles / "1001.0001.tar.gz").write_bytes(out.getvalue())
    (articles / "1001.0002.gz").write_bytes(gzip.compress(b"\\documentclass{a} one file"))
    prepare([str(text)], root / "corpus", load_tokenizer("bytes"), valid=0.2, workers=1)
    for family in ("gss", "transformer", "slide"):
        model = gss.build_model(small_config(family, **SIZES)).eval()
        run = save_run(model, root / f"run-{family}")
        metrics = [json.dumps({"step": step, "loss": 2.0, "tokens_per_second": 10.0}) for step in range(5)]
        (run / "metrics.jsonl").write_text("\n".join(metrics) + "\n")
        (run / "lock").touch()
        (root / f"state-{family}").mkdir()
        gss.save_state(gss.load(run).read("some text"), root / f"state-{family}" / "state.safetensors")
    if EXPORTS:
        hf.export_run(root / "run-gss", root / "export")
    load_tokenizer("bytes").save(root / "tokenizer-bytes")
    _trained_vocabulary(root / "tokenizer-json")


def _trained_vocabulary(folder: Path) -> None:
    import tokenizers

    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=280, special_tokens=["</s>"], initial_alphabet=alphabet)
    model.train_from_iterator(["some words and some other words"] * 5, trainer)
    folder.mkdir()
    model.save(str(folder / "tokenizer.json"))
    load_tokenizer(folder / "tokenizer.json").save(folder)


# What is done with a folder of each kind; anything but ValueError and OSError that comes of it is a defect.


def use_run(folder: Path, scratch: Path) -> None:
    read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").is_file() else None
    opened = RunFolder(folder)
    try:
        opened.open()
    except ValueError:
        pass
    finally:
        opened.close()
    lm = gss.load(folder)
    assert isinstance(lm.generate("ab", max_tokens=3, temperature=0), str)


def use_export(folder: Path, scratch: Path) -> None:
    with contextlib.suppress(ValueError):
        gss.load(hf.import_folder(folder, scratch / "out"))
    assert isinstance(gss.load(folder).generate("ab", max_tokens=3, temperature=0), str)


def use_state(folder: Path, scratch: Path) -> None:
    family = folder.name.partition("-")[2]
    state = gss.load_state(folder / "state.safetensors")
    lm = gss.load(folder.parents[1] / "originals" / f"run-{family}")
    assert isinstance(lm.generate("ab", max_tokens=3, temperature=0, state=state), str)


def use_corpus(folder: Path, scratch: Path) -> None:
    for split in ("train", "valid"):
        dataset = open_dataset(folder, split)
        for document in dataset.documents():
            assert 0 <= int(document.tokens.max()) < dataset.vocab_size
        assert dataset.lengths.min() >= 1
        assert dataset.tokenizer().vocab_size
        for kind in (Segments, Packed, Lanes):
            batch = kind(dataset, 16, 2, 0).batch(0)
            assert 0 <= int(batch.tokens.min()) <= int(batch.tokens.max()) < dataset.vocab_size


def use_tokenizer(folder: Path, scratch: Path) -> None:
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("some words ü\ufffd")
    assert not len(ids) or int(ids.max()) < tokenizer.vocab_size
    assert isinstance(tokenizer.decode(ids), str)


def use_sources(folder: Path, scratch: Path) -> None:
    articles = folder.name == "articles"
    options = SourceOptions(local=str(folder)) if articles else SourceOptions()
    names = ["arxiv"] if articles else [str(folder)]
    made = prepare(names, scratch / "out", load_tokenizer("bytes"), options=options, valid=0.2, workers=1)
    for split in made.splits:
        open_dataset(scratch / "out", split)


USES: dict[str, Callable[[Path, Path], None]] = {
    **{f"run-{family}": use_run for family in ("gss", "transformer", "slide")},
    **{f"state-{family}": use_state for family in ("gss", "transformer", "slide")},
    **{"corpus": use_corpus, "tokenizer-bytes": use_tokenizer, "tokenizer-json": use_tokenizer},
    **{"sources": use_sources, "articles": use_sources},
    **({"export": use_export} if EXPORTS else {}),
}


class TooSlowError(BaseException):
    """No `except Exception` on the way catches it."""


def attempt(root: Path, seed: int, number: int) -> tuple[str, str]:
    """One input: how it ended ("sound", "refused", or what is wrong), and what it was."""
    draw = random.Random(f"{seed}:{number}")
    kind = draw.choice(list(USES))
    folder = fresh_copy(root / "originals" / kind, root / "inputs" / kind)
    scratch = root / "scratch"
    scratch.mkdir(exist_ok=True)
    (root / "outside" / "precious").write_text("precious")
    what = f"{number} {kind}: {mutate(folder, draw, root / 'outside')}"
    started = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of processor time: other programs' load is not the input's
    signal.alarm(5 * SECONDS)
    try:
        USES[kind](folder, scratch)
        outcome = "sound"
    except (ValueError, OSError) as error:
        outcome = "refused" if str(error) and not isinstance(error, UnicodeError) else f"unclear: {error!r}"
    except (Exception, TooSlowError):
        outcome = traceback.format_exc(limit=-4)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
    if (seconds := time.process_time() - started) > SECONDS:
        outcome = f"{seconds:.0f} seconds: {outcome}"
    for path in (root / "scratch").iterdir():
        fresh_copy(root / "empty", path) if path.is_dir() else path.unlink()
    left = sorted(str(path.relative_to(root)) for path in (root / "outside").rglob("*"))
    if left != ["outside/precious"] or (root / "outside" / "precious").read_text() != "precious":
        outcome = f"touched {left} outside: {outcome}"
    return outcome, what


def _too_slow(number: int, frame: Any) -> None:
    raise TooSlowError(f"over {SECONDS} seconds")


def work(root: Path, seed: int, numbers: range, report: Any) -> None:
    """Inputs in a process of their own, with little memory to take."""
    import resource

    torch.set_num_threads(1)
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, _too_slow)
    pages = int(Path("/proc/self/statm").read_text().split()[5])  # of data; files that are mapped do not count
    limit = pages * os.sysconf("SC_PAGE_SIZE") + BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    for number in numbers:
        report.send((number, None, ""))
        report.send((number, *attempt(root, seed, number)))


def fuzz(root: Path, seed: int, count: int, first: int = 0) -> Counter[str]:
    """Try inputs; how many ended how. The first fifty defects are kept, and fail the test."""
    for name in ("inputs", "outside", "empty"):
        (root / name).mkdir()
    make_originals(root / "originals")
    context, counts, defects = multiprocessing.get_context("fork"), Counter[str](), list[str]()
    at, end = first, first + count
    while at < end:
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(root, seed, range(at, min(at + 500, end)), send), daemon=True)
        process.start()
        send.close()
        try:
            while receive.poll(7 * SECONDS):
                number, outcome, what = receive.recv()
                at = number + (outcome is not None)
                if outcome is None:
                    continue
                counts[outcome if outcome in ("sound", "refused") else "defect"] += 1
                if outcome not in ("sound", "refused") and len(defects) < 50:
                    defects.append(f"{what}\n{outcome}")
                    print(defects[-1], flush=True)
        except EOFError:
            process.join()
        if process.exitcode != 0:
            process.kill()
            process.join()
            counts["defect"] += 1
            defects.append(f"{at}: the process died or hung, exit code {process.exitcode}")
            at += 1
    print(f"seed {seed}, {count} inputs from {first}: {dict(counts)}")
    assert not defects, "\n\n".join([f"{len(defects)} defects", *defects])
    return counts


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is bounded as Linux bounds it")
class TestMutatedFiles:
    def test_a_few(self, tmp_path: Path) -> None:
        counts = fuzz(tmp_path, 1, 60)
        assert counts["sound"] > 3
        assert counts["refused"] > 20

    @pytest.mark.soak
    def test_ten_thousand(self, tmp_path: Path) -> None:
        fuzz(tmp_path, int(os.environ.get("GSS_FUZZ_SEED", "28")), int(os.environ.get("GSS_FUZZ", "10000")))
