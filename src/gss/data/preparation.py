"""Prepare: from sources to a corpus folder of token files, in parallel, resumable after a kill.

The plan (which spans, in which parts) depends on names and sizes alone. Parts are made beside the target in
`<out>.preparing`; those that exist are not made again. When all are there they are merged, and the finished folder is
renamed into place: `out` is whole or it is not there. The result does not depend on the number of processes, nor on
how often the work was interrupted.
"""

import hashlib
import json
import multiprocessing
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import wait as wait_for_sentinel
from pathlib import Path
from typing import Any

from gss.data.formats import Span
from gss.data.merge import SplitShares, merge_parts
from gss.data.parts import CorpusPart, make_parts, token_dtype, write_part
from gss.data.shards import (
    FORMAT,
    MANIFEST,
    TOKENIZER_FOLDER,
    VERSION,
    Manifest,
    read_manifest,
    write_manifest,
)
from gss.data.sources import SourceOptions, find_spans
from gss.data.tokenizer import Tokenizer, load_tokenizer
from gss.io.files import explained_full_disk, lock, write_file

Progress = Callable[[int, int], None]  # bytes done, bytes in all


def prepare(
    sources: Sequence[str],
    out: str | os.PathLike[str],
    tokenizer: Tokenizer,
    *,
    options: SourceOptions | None = None,
    valid: float = 0.05,
    test: float = 0.0,
    workers: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Tokenize sources into the folder `out` and return its manifest; run again after a kill, it continues.

    Documents of a corpus without splits of its own go to `valid` and `test` by these shares, by a hash of their
    contents; of a single text file, the end does. `force` replaces a corpus that is in `out` already; without it a
    different one is refused. Anything else in `out` is never replaced.
    """
    options = options or SourceOptions()
    shares = SplitShares(valid, test)
    target = Path(out)
    spans = find_spans(list(sources), options, {"valid": valid, "test": test})
    request = _request(options, shares, tokenizer, spans)
    work = target.with_name(target.name + ".preparing")
    _refuse_sources_in((target, work), spans)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(work), explained_full_disk(work, "finished parts are kept and it continues after them"):
        there = _already_there(target, request, spans, force)
        if there is None:
            parts = make_parts(spans, options.span_bytes)
            _open_work(work, request, parts, tokenizer)
            _write_parts(parts, work, tokenizer, workers or usable_cores(), progress or (lambda done, total: None))
            there = _finish(parts, work, target, tokenizer, shares, {"sources": list(sources), "request": request})
        shutil.rmtree(work, ignore_errors=os.name == "nt")  # where the lock, still open, cannot be removed
    return there


def usable_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _request(options: SourceOptions, shares: SplitShares, tokenizer: Tokenizer, spans: list[Span]) -> str:
    """The identity of what is asked for: the same request gives the same corpus."""
    asked: dict[str, Any] = {
        "version": VERSION,
        "splits": options.splits,
        "shares": asdict(shares),
        "tokenizer": tokenizer.hash,
        "pieces": [(s.kind, s.name, s.size, s.split, s.start, s.stop, s.field) for s in spans],
    }
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def _refuse_sources_in(folders: Sequence[Path], spans: list[Span]) -> None:
    """Refuse to write where a source lies: what is there is cleared away in the end."""
    paths = {Path(span.path) for span in spans}
    parents = {parent: parent.resolve() for parent in {path.parent for path in paths}}
    # A link counts where it lies and where it leads.
    places = {path.resolve() for path in paths} | {parents[path.parent] / path.name for path in paths}
    for folder in folders:
        resolved = folder.resolve()
        if any(place.is_relative_to(resolved) for place in places):
            raise ValueError(f"{folder} is a source or holds one, and would be replaced: choose another --out")


def _already_there(target: Path, request: str, spans: list[Span], force: bool) -> Manifest | None:
    """The corpus in `target` if it is the one asked for; None where one may be written.

    Sources count by their names and sizes. Whether they hold what they held is not read; newer ones get a warning.
    """
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return None
    manifest = target / MANIFEST
    # Of a damaged corpus, which may be replaced, the format's name is still there.
    if not manifest.is_file() or FORMAT.encode() not in manifest.read_bytes():
        raise ValueError(f"{target} exists and is not a prepared corpus: choose another --out, or remove it yourself")
    if force:
        return None
    found = read_manifest(target)
    if found.content["request"] != request:
        raise ValueError(
            f"{target} holds a corpus prepared otherwise: choose another --out, or replace it with --force"
        )
    newer = [span.path for span in spans if span.stamp > manifest.stat().st_mtime_ns]
    if newer:
        warnings.warn(
            f"{target} was prepared before {newer[0]} was last written: if its text has changed, give --force",
            stacklevel=3,
        )
    return found


@contextmanager
def _locked(work: Path) -> Iterator[None]:
    """Hold the work folder for this process alone."""
    work.mkdir(exist_ok=True)
    with open(work / "lock", "w") as held:
        try:
            lock(held)
        except OSError as error:
            raise ValueError(
                f"another gss prepare is at work in {work}: wait for it, or choose another --out"
            ) from error
        try:
            yield
        finally:
            if work.is_dir() and [path.name for path in work.iterdir()] == ["lock"]:
                shutil.rmtree(work)


def _open_work(work: Path, request: str, parts: list[CorpusPart], tokenizer: Tokenizer) -> None:
    """Keep the parts of an interrupted run of the very same plan; clear away everything else."""
    stamps = [(span.path, span.stamp) for part in parts for span in part.spans]
    shape = [len(part.spans) for part in parts]
    plan = hashlib.sha256(json.dumps([request, stamps, shape]).encode()).hexdigest()
    plan_file = work / "plan"
    same = plan_file.is_file() and plan_file.read_text() == plan
    wanted = {part.name for part in parts} | {"lock", "plan"}
    for path in work.iterdir():
        if path.name == "lock" or (same and path.name in wanted):
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    tokenizer.save(work / TOKENIZER_FOLDER)
    write_file(plan_file, plan)


# Each worker process loads the vocabulary once, and keeps it here.
_worker_tokenizer: Tokenizer | None = None


def _start_worker(tokenizer_folder: str) -> None:
    global _worker_tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker_tokenizer = load_tokenizer(tokenizer_folder)
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait_for_sentinel([parent.sentinel])
    os._exit(1)  # the parent was killed: nobody waits for this work, and a new run may be doing it again


def _work_on(part: CorpusPart, work: Path) -> int:
    assert _worker_tokenizer is not None
    write_part(part, work, _worker_tokenizer)
    return part.size


def _write_parts(parts: list[CorpusPart], work: Path, tokenizer: Tokenizer, workers: int, report: Progress) -> None:
    total = sum(part.size for part in parts)
    waiting = [part for part in parts if not (work / part.name).is_dir()]
    done = total - sum(part.size for part in waiting)
    report(done, total)
    if workers == 1 or len(waiting) <= 1:
        for part in waiting:
            write_part(part, work, tokenizer)
            done += part.size
            report(done, total)
        return
    context = multiprocessing.get_context("spawn")  # a forked copy of threaded libraries may hang
    folder = str(work / TOKENIZER_FOLDER)
    with ProcessPoolExecutor(min(workers, len(waiting)), context, _start_worker, (folder,)) as pool:
        try:
            for future in as_completed([pool.submit(_work_on, part, work) for part in waiting]):
                done += future.result()
                report(done, total)
        except BrokenProcessPool as error:
            raise ValueError(
                "a worker process was killed, most likely for want of memory: run the same command again with fewer "
                "--workers; it continues"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _finish(
    parts: list[CorpusPart], work: Path, target: Path, tokenizer: Tokenizer, shares: SplitShares, asked: dict[str, Any]
) -> Manifest:
    """Merge the parts into a folder aside, seal it and rename it into place."""
    result = work / "result"
    shutil.rmtree(result, ignore_errors=True)
    result.mkdir()
    tokenizer.save(result / TOKENIZER_FOLDER)
    folders = [work / part.name for part in parts]
    splits, left_out = merge_parts(folders, work / "table", result, tokenizer.vocab_size, shares)
    if not splits:
        reasons = ", ".join(f"{entry['documents']} {reason}" for reason, entry in left_out.items())
        shutil.rmtree(work)
        raise ValueError(f"no document could be used ({reasons or 'there was none'}): nothing was written")
    content = {
        "format": FORMAT,
        "version": VERSION,
        "sources": asked["sources"],
        "tokenizer": {
            "kind": tokenizer.kind,
            "vocab_size": tokenizer.vocab_size,
            "eos_id": tokenizer.eos_id,
            "losses": list(tokenizer.losses),
            "hash": tokenizer.hash,
        },
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "splits": splits,
        "left_out": left_out,
        "request": asked["request"],
    }
    sealed = write_manifest(result, content)
    if target.exists():
        os.rename(target, work / "replaced")
    os.rename(result, target)
    return sealed
