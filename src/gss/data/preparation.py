"""Prepare: from sources to a corpus folder of token files, in parallel, resumable after a kill.

The plan (which pieces, in which units) depends on names and sizes alone. Each unit becomes a part beside the target
in `<out>.preparing`; parts that exist are not made again. When all are there they are merged, and the finished folder
is renamed into place: `out` is whole or it is not there. The result does not depend on the number of processes,
nor on how often the work was interrupted.
"""

import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import wait as wait_for_sentinel
from pathlib import Path
from typing import Any

from gss.data.manifest import (
    FORMAT,
    MANIFEST,
    TOKENIZER_FOLDER,
    VERSION,
    Manifest,
    SplitWriter,
    read_manifest,
    write_manifest,
)
from gss.data.merge import SplitShares, merge_parts
from gss.data.parts import Unit, explain_full_disk, make_units, token_dtype, write_part, write_synced
from gss.data.readers import Piece
from gss.data.sources import SPLITS, SourceOptions, find_pieces
from gss.data.tokenizer import Tokenizer, load_tokenizer

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
    """Tokenise sources into the folder `out` and return its manifest; run again after a kill, it goes on.

    Documents of a corpus without splits of its own go to `valid` and `test` by these shares, by a hash of their
    contents. `force` replaces a corpus that is in `out` already; without it a different one is refused. Anything else
    in `out` is never replaced.
    """
    options = options or SourceOptions()
    shares = SplitShares(valid, test)
    target = Path(out)
    pieces = find_pieces(list(sources), options)
    request = _request(options, shares, tokenizer, pieces)
    work = target.with_name(target.name + ".preparing")
    _refuse_sources_in((target, work), pieces)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(work):
        there = _already_there(target, request, pieces, force)
        if there is None:
            units = make_units(pieces, options.piece_bytes)
            _open_work(work, request, units, tokenizer)
            _write_parts(units, work, tokenizer, workers or len(os.sched_getaffinity(0)), progress)
            there = _finish(units, work, target, tokenizer, shares, request, list(sources))
        shutil.rmtree(work)
    return there


def _request(options: SourceOptions, shares: SplitShares, tokenizer: Tokenizer, pieces: list[Piece]) -> str:
    """The identity of what is asked for: the same request gives the same corpus."""
    asked: dict[str, Any] = {
        "version": VERSION,
        "splits": options.splits,
        "shares": asdict(shares),
        "tokenizer": tokenizer.hash,
        "pieces": [(p.kind, p.name, p.size, p.split, p.start, p.stop, p.field) for p in pieces],
    }
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def _refuse_sources_in(folders: Sequence[Path], pieces: list[Piece]) -> None:
    """Refuse to write where a source lies: what is there is cleared away in the end."""
    paths = {Path(piece.path) for piece in pieces}
    parents = {parent: parent.resolve() for parent in {path.parent for path in paths}}
    # A link counts where it lies and where it leads.
    places = {path.resolve() for path in paths} | {parents[path.parent] / path.name for path in paths}
    for folder in folders:
        resolved = folder.resolve()
        if any(place.is_relative_to(resolved) for place in places):
            raise ValueError(f"{folder} is a source or holds one, and would be replaced: choose another --out")


def _already_there(target: Path, request: str, pieces: list[Piece], force: bool) -> Manifest | None:
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
    newer = [piece.path for piece in pieces if piece.stamp > manifest.stat().st_mtime_ns]
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
    with open(work / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(
                f"another gss prepare is at work in {work}: wait for it, or choose another --out"
            ) from error
        try:
            yield
        finally:
            if work.is_dir() and [path.name for path in work.iterdir()] == ["lock"]:
                shutil.rmtree(work)


def _open_work(work: Path, request: str, units: list[Unit], tokenizer: Tokenizer) -> None:
    """Keep the parts of an interrupted run of the very same plan; clear away everything else."""
    stamps = [(piece.path, piece.stamp) for unit in units for piece in unit.pieces]
    shape = [len(unit.pieces) for unit in units]
    plan = hashlib.sha256(json.dumps([request, stamps, shape]).encode()).hexdigest()
    plan_file = work / "plan"
    same = plan_file.is_file() and plan_file.read_text() == plan
    wanted = {unit.part_name for unit in units} | {"lock", "plan"}
    for path in work.iterdir():
        if path.name == "lock" or (same and path.name in wanted):
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    try:
        tokenizer.save(work / TOKENIZER_FOLDER)
        write_synced(plan_file, plan.encode())
    except OSError as error:
        explain_full_disk(error, work)
        raise


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


def _work_on(unit: Unit, work: str) -> int:
    assert _worker_tokenizer is not None
    write_part(unit, Path(work), _worker_tokenizer, SPLITS)
    return unit.size


def _write_parts(units: list[Unit], work: Path, tokenizer: Tokenizer, workers: int, progress: Progress | None) -> None:
    total = sum(unit.size for unit in units)
    waiting = [unit for unit in units if not (work / unit.part_name).is_dir()]
    done = total - sum(unit.size for unit in waiting)
    report = progress or (lambda done, total: None)
    report(done, total)
    if workers == 1 or len(waiting) <= 1:
        for unit in waiting:
            write_part(unit, work, tokenizer, SPLITS)
            done += unit.size
            report(done, total)
        return
    context = multiprocessing.get_context("spawn")  # a forked copy of threaded libraries may hang
    folder = str(work / TOKENIZER_FOLDER)
    with ProcessPoolExecutor(min(workers, len(waiting)), context, _start_worker, (folder,)) as pool:
        running: set[Future[int]] = set()
        try:
            for unit in waiting:
                if len(running) >= 2 * workers:  # a long plan is not queued whole
                    finished, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in finished:
                        done += future.result()
                        report(done, total)
                running.add(pool.submit(_work_on, unit, str(work)))
            while running:
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
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
    units: list[Unit],
    work: Path,
    target: Path,
    tokenizer: Tokenizer,
    shares: SplitShares,
    request: str,
    sources: list[str],
) -> Manifest:
    """Merge the parts into a folder aside, seal it and rename it into place."""
    result = work / "result"
    shutil.rmtree(result, ignore_errors=True)
    try:
        result.mkdir()
        tokenizer.save(result / TOKENIZER_FOLDER)
        dtype = token_dtype(tokenizer.vocab_size)
        writers = {split: SplitWriter(result, split, dtype, tokenizer.vocab_size) for split in SPLITS}
        parts = [work / unit.part_name for unit in units]
        left_out = merge_parts(parts, work / "table", writers, dtype, shares)
        facts = {split: writer.close() for split, writer in writers.items()}
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "sources": sources,
            "tokenizer": {
                "kind": tokenizer.kind,
                "vocab_size": tokenizer.vocab_size,
                "eos_id": tokenizer.eos_id,
                "losses": list(tokenizer.losses),
                "hash": tokenizer.hash,
            },
            "dtype": dtype.name,
            "splits": {split: found for split, found in facts.items() if found is not None},
            "left_out": left_out,
            "request": request,
        }
        if not manifest["splits"]:
            reasons = ", ".join(f"{entry['documents']} {reason}" for reason, entry in left_out.items())
            shutil.rmtree(work)
            raise ValueError(f"no document could be used ({reasons or 'there was none'}): nothing was written")
        sealed = write_manifest(result, manifest)
    except OSError as error:
        explain_full_disk(error, work)
        raise
    if target.exists():
        os.rename(target, work / "replaced")
    os.rename(result, target)
    return sealed
