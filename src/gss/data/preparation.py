"""Prepare: from sources to a corpus folder of token files, in parallel, resumable, on one machine or on several.

The plan (which spans, in which parts) depends only on names and sizes. A machine makes its share of the parts (all of
them, or every n-th) in `<out>.preparing`, and skips those that exist. Once all parts exist, they are merged, either
directly or by `merge_shares` from several machines, and the finished folder is renamed into place: `out` is either
complete or absent. The result does not depend on the number of processes or machines, or on interruptions.
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
from functools import cache
from multiprocessing.connection import wait as wait_for_sentinel
from pathlib import Path
from typing import Any

from gss.data.formats import Span, file_system, is_url
from gss.data.merging import merge_parts
from gss.data.parts import Part, make_parts, token_dtype, write_part
from gss.data.shards import (
    FORMAT,
    MANIFEST,
    SHARE_FORMAT,
    TOKENIZER_FOLDER,
    VERSION,
    Manifest,
    read_sealed,
    write_manifest,
)
from gss.data.sources import SourceOptions, find_spans
from gss.data.tokenizer import Tokenizer, load_tokenizer
from gss.io.files import explained_full_disk, lock, require_name, write_file

Progress = Callable[[int, int], None]  # bytes done, bytes in total


def prepare(
    sources: Sequence[str],
    out: str | os.PathLike[str],
    tokenizer: Tokenizer,
    *,
    options: SourceOptions | None = None,
    valid: float = 0.05,
    test: float = 0.0,
    share: tuple[int, int] = (1, 1),
    workers: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Tokenize sources into the folder `out` and return its manifest. After a kill, the same call continues.

    If a corpus has no splits of its own, a hash of each document's contents decides, with the shares `valid` and
    `test`; of a single text file, the end is held out. With `share=(2, 3)` this is the second of three machines: it
    does its third of the work, and `out` is for `merge_shares`. A different corpus in `out` is an error unless `force`
    is set, which replaces it. Anything else in `out` is never replaced.
    """
    options = options or SourceOptions()
    check_shares(valid, test)
    number, machines = share
    if not 1 <= number <= machines:
        raise ValueError(f"part {number}/{machines}: parts are numbered from 1/{machines} to {machines}/{machines}")
    spans = find_spans(list(sources), options, {"valid": valid, "test": test})
    parts = make_parts(spans, options.span_bytes)
    # The same request gives the same corpus.
    request: dict[str, Any] = {
        "version": VERSION,
        "splits": options.splits,
        "shares": {"valid": valid, "test": test},
        "tokenizer": tokenizer.hash,
        "pieces": [(s.kind, s.name, s.size, s.split, s.start, s.stop, s.field) for s in spans],
    }
    asked = {
        "format": SHARE_FORMAT,
        "version": VERSION,
        "sources": list(sources),
        "request": _hash(request),
        "held_out": [valid, test],
        "parts": len(parts),
        "share": list(share),
    }
    with _working_folder(Path(out), spans) as work:
        there = _already_there(Path(out), asked, spans, force)
        if there is not None:
            return there
        mine = parts[number - 1 :: machines]
        made = _open_share(work, asked, mine, tokenizer)
        _write_parts(mine, made, tokenizer, workers or usable_cores(), progress or (lambda done, total: None))
        if machines == 1:
            return _merge([str(made)], work, Path(out))
        _put_in_place(made, Path(out), work)
        return read_sealed(f"{out}/{MANIFEST}", SHARE_FORMAT)


def merge_shares(shares: Sequence[str], out: str | os.PathLike[str], *, force: bool = False) -> Manifest:
    """Make a corpus from the shares that `prepare` made on several machines: folders or URLs, in any order."""
    found = [(share, _read_share(share)) for share in shares]
    if not found:
        raise ValueError("no parts given: name the folders made by gss prepare --part")
    found.sort(key=lambda pair: pair[1]["share"])
    first, machines = found[0][1], found[0][1]["share"][1]
    for share, asked in found:
        if any(asked[key] != first[key] for key in ("request", "parts", "held_out")):
            raise ValueError(
                f"{share} and {found[0][0]} are not parts of one corpus: their sources, options or vocabularies differ"
            )
    given = [asked["share"] for _, asked in found]
    if len(given) != machines or given != [[number, machines] for number in range(1, machines + 1)]:
        names = ", ".join(f"{number}/{of}" for number, of in given)
        raise ValueError(f"a corpus of {machines} parts needs each of them once, but these are {names}")
    with _working_folder(Path(out), []) as work:
        there = _already_there(Path(out), {**first, "share": [1, 1]}, [], force)
        return there or _merge([share for share, _ in found], work, Path(out))


def _read_share(share: str) -> dict[str, Any]:
    """The manifest of a share, checked, because anyone can write one."""
    asked = read_sealed(f"{share}/{MANIFEST}", SHARE_FORMAT).content
    try:
        (number, machines), (valid, test), parts = asked["share"], asked["held_out"], asked["parts"]
        check_shares(valid, test)
        counted = type(parts) is int and 0 <= parts < 10**6
        if not (1 <= number <= machines and counted and {"request", "sources"} <= set(asked)):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{share} is not a valid part of a corpus: prepare it again, with --force") from None
    return asked


def check_shares(valid: float, test: float) -> None:
    """Refuse shares of documents for the held-out splits that leave none for training."""
    if not (0 <= valid < 1 and 0 <= test < 1 and valid + test < 1):
        raise ValueError(f"the shares valid={valid} and test={test} must leave some for training")


def usable_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _hash(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()


def _already_there(target: Path, asked: dict[str, Any], spans: list[Span], force: bool) -> Manifest | None:
    """The corpus or share in `target` if it is the one asked for; None if one may be written.

    Sources are compared by name and size, not by contents; if one is newer than the corpus, there is a warning.
    """
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return None
    manifest = target / MANIFEST
    # A damaged corpus, which may be replaced, still has the name of the format.
    if not manifest.is_file() or FORMAT.encode() not in manifest.read_bytes():
        raise ValueError(f"{target} exists and is not a prepared corpus: choose another --out, or remove it yourself")
    if force:
        return None
    found = read_sealed(str(manifest), FORMAT, SHARE_FORMAT)
    if (found.content.get("request"), found.content.get("share", [1, 1])) != (asked["request"], asked["share"]):
        raise ValueError(f"{target} holds a corpus that was prepared differently: choose another --out, or use --force")
    newer = [span.path for span in spans if span.stamp > manifest.stat().st_mtime_ns]
    if newer:
        older = f"{target} was prepared before {newer[0]} was last written"
        warnings.warn(f"{older}: if its text has changed, use --force", stacklevel=3)
    return found


@contextmanager
def _working_folder(target: Path, spans: list[Span]) -> Iterator[Path]:
    """The folder beside the target where the work is done, locked by this process and deleted on success.

    Refuses target and working folders that contain a source, because everything in them is deleted in the end.
    """
    require_name(target)
    work = target.with_name(target.name + ".preparing")
    paths = {Path(span.path) for span in spans if not is_url(span.path)}
    parents = {parent: parent.resolve() for parent in {path.parent for path in paths}}
    # A link counts both where it is and where it points.
    places = {path.resolve() for path in paths} | {parents[path.parent] / path.name for path in paths}
    for folder in (target, work):
        resolved = folder.resolve()
        if any(place.is_relative_to(resolved) for place in places):
            raise ValueError(f"{folder} contains a source, which would be overwritten: choose another --out")
    work.mkdir(parents=True, exist_ok=True)
    with open(work / "lock", "w") as held:
        try:
            lock(held)
        except OSError as error:
            raise ValueError(f"another gss prepare is running in {work}: wait, or choose another --out") from error
        try:
            with explained_full_disk(work, "finished parts are kept and it continues after them"):
                yield work
                shutil.rmtree(work, ignore_errors=os.name == "nt")  # which cannot remove the lock, still open
        finally:
            if work.is_dir() and [path.name for path in work.iterdir()] == ["lock"]:
                shutil.rmtree(work)


def _open_share(work: Path, asked: dict[str, Any], parts: list[Part], tokenizer: Tokenizer) -> Path:
    """The folder for the parts. Only parts that an interrupted run of exactly the same plan has made are kept."""
    folder, plan_file = work / "share", work / "plan"
    stamps = [[(span.path, span.stamp) for span in part.spans] for part in parts]
    plan = _hash([asked, stamps])
    wanted = {"lock", "share"}
    if plan_file.is_file() and plan_file.read_text() == plan:
        wanted |= {"plan", *(part.name for part in parts)}
    for path in [*work.iterdir(), *(folder.iterdir() if folder.is_dir() else ())]:
        if path.name not in wanted:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    tokenizer.save(folder / TOKENIZER_FOLDER)
    write_manifest(folder, asked)
    write_file(plan_file, plan)
    return folder


def _end_with_parent() -> None:
    """Make a worker process end when its parent does."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait_for_sentinel([parent.sentinel])
        os._exit(1)  # the parent was killed, and a new run may be doing this work again

    threading.Thread(target=watch, daemon=True).start()


_load_once = cache(load_tokenizer)  # in each worker process


def _work_on(part: Part, folder: Path) -> Part:
    write_part(part, folder, _load_once(folder / TOKENIZER_FOLDER))
    return part


def _write_parts(parts: list[Part], folder: Path, tokenizer: Tokenizer, workers: int, report: Progress) -> None:
    total, done = sum(part.size for part in parts), 0

    def finished(part: Part) -> None:
        nonlocal done
        done += part.size
        report(done, total)

    waiting = []
    for part in parts:
        finished(part) if (folder / part.name).is_dir() else waiting.append(part)
    if workers == 1 or len(waiting) <= 1:
        for part in waiting:
            write_part(part, folder, tokenizer)
            finished(part)
        return
    context = multiprocessing.get_context("spawn")  # a forked copy of threaded libraries may hang
    with ProcessPoolExecutor(min(workers, len(waiting)), context, _end_with_parent) as pool:
        try:
            for future in as_completed([pool.submit(_work_on, part, folder) for part in waiting]):
                finished(future.result())
        except BrokenProcessPool as error:
            raise ValueError("a worker was killed, likely out of memory: run again with fewer --workers") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _merge(shares: list[str], work: Path, target: Path) -> Manifest:
    """Merge the parts of all shares in the working folder, seal the result and move it to the target."""
    asked = _read_share(shares[0])
    result, vocabulary = work / "result", Path(shares[0], TOKENIZER_FOLDER)
    shutil.rmtree(result, ignore_errors=True)
    result.mkdir()
    if is_url(shares[0]):
        files, root = file_system(shares[0])
        vocabulary = result / TOKENIZER_FOLDER
        files.get(f"{root}/{TOKENIZER_FOLDER}/", f"{vocabulary}/", recursive=True)
    tokenizer = load_tokenizer(vocabulary)
    tokenizer.save(result / TOKENIZER_FOLDER)
    parts = [f"{shares[number % len(shares)]}/{Part(number, []).name}" for number in range(asked["parts"])]
    splits, left_out = merge_parts(parts, work / "table", result, tokenizer.vocab_size, *asked["held_out"])
    if not splits:
        reasons = ", ".join(f"{entry['documents']} {reason}" for reason, entry in left_out.items())
        shutil.rmtree(work)
        raise ValueError(f"no document could be used ({reasons or 'there was none'}): nothing was written")
    facts = {name: getattr(tokenizer, name) for name in ("kind", "vocab_size", "eos_id")}
    content = {
        "format": FORMAT,
        "version": VERSION,
        "sources": asked["sources"],
        "tokenizer": {**facts, "losses": list(tokenizer.losses), "hash": tokenizer.hash},
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "splits": splits,
        "left_out": left_out,
        "request": asked["request"],
    }
    sealed = write_manifest(result, content)
    _put_in_place(result, target, work)
    return sealed


def _put_in_place(result: Path, target: Path, work: Path) -> None:
    if target.exists():
        os.rename(target, work / "replaced")
    os.rename(result, target)
