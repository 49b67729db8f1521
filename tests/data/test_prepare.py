"""Prepare: the result is one function of its sources, whole or absent; damage and full disks are told."""

import copy
import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_corpora import contents, folder_bytes, make_text, write_files

from gss.data import Segments, SourceOptions, load_tokenizer, merge_shares, open_dataset, prepare, read_manifest
from gss.data.chunks import CHUNK
from gss.data.parts import token_dtype
from gss.data.preparation import check_shares
from gss.data.shards import write_manifest
from gss.data.tokenizer import ByteTokenizer
from gss.data.tokenizer_training import train_tokenizer
from gss.io.files import written_folder
from tests.conftest import posix

BYTES = load_tokenizer("bytes")


@pytest.fixture
def corpus(tmp_path: Path, texts: list[str]) -> Path:
    return write_files(tmp_path / "corpus", {f"{number:03d}.txt": text for number, text in enumerate(texts)})


def test_tokens_index_and_counts(corpus: Path, tmp_path: Path, texts: list[str]) -> None:
    manifest = prepare([str(corpus)], tmp_path / "out", BYTES, valid=0, workers=1)
    dataset = open_dataset(tmp_path / "out")
    names = [document.name for document in dataset.documents()]
    assert names[:3] == [f"corpus/{i:03d}.txt" for i in range(3)]
    for document, text in zip(dataset.documents(), texts, strict=True):
        assert document.tokens.tolist() == [*text.encode(), 256]
        assert (document.bytes, document.words) == (len(text.encode()), len(text.split()))
    facts = manifest.splits["train"]
    size = sum(len(text.encode()) for text in texts)
    assert (facts["documents"], facts["bytes"], facts["tokens"]) == (60, size, size + 60)
    assert facts["words"] == sum(len(text.split()) for text in texts)
    assert facts["tokens_per_byte"] == 1.0
    assert facts["longest"] == dataset.lengths.max()
    shares = np.bincount(dataset.tokens, minlength=257) / len(dataset.tokens)
    expected = -sum(float(p) * float(np.log(p)) for p in shares if p)
    assert dataset.unigram_entropy == pytest.approx(expected, rel=1e-12)
    assert dataset.hash == manifest.hash
    assert dataset.tokens.dtype == np.uint16


def test_the_result_does_not_depend_on_processes_or_spans(corpus: Path, tmp_path: Path) -> None:
    results = []
    for number, (workers, span_bytes) in enumerate(((1, 1 << 24), (1, 2000), (3, 2000), (2, 5000))):
        out = tmp_path / str(number)
        options = SourceOptions(span_bytes=span_bytes)
        prepare([str(corpus)], out, BYTES, options=options, valid=0.2, test=0.1, workers=workers)
        results.append(folder_bytes(out))
    assert all(result == results[0] for result in results)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1", "2", "3", "corpus"]


def test_duplicates_are_dropped_and_held_out_text_stays_held_out(tmp_path: Path) -> None:
    a, b, c = (make_text(seed, 40) for seed in range(3))
    named = {"train/1": a, "train/2": b, "train/3": a, "valid/1": b, "test/1": c, "valid/2": c}
    write_files(tmp_path / "c", {f"{name}.txt": text for name, text in named.items()})
    manifest = prepare([str(tmp_path / "c")], tmp_path / "out", BYTES, workers=1)
    found = contents(tmp_path / "out")
    assert {split: list(documents.values()) for split, documents in found.items()} == {
        "train": [a],
        "valid": [b],
        "test": [c],
    }
    assert manifest.left_out["duplicate"] == {
        "documents": 3,
        "first": ["c/train/2.txt", "c/train/3.txt", "c/valid/2.txt"],
    }


def test_many_documents_in_buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.dumps({"text": f"row {i % 700}"}) for i in range(1000)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    plain = prepare([str(tmp_path / "rows.jsonl")], tmp_path / "plain", BYTES, workers=1)
    monkeypatch.setattr("gss.data.merging.BUCKET", 64)
    monkeypatch.setattr("gss.data.merging.ROWS", 50)
    monkeypatch.setattr("gss.data.merging.COPY", 7)
    small = prepare([str(tmp_path / "rows.jsonl")], tmp_path / "small", BYTES, workers=1)
    assert plain.left_out["duplicate"]["documents"] == 300
    assert folder_bytes(tmp_path / "plain") == folder_bytes(tmp_path / "small")
    assert small.hash == plain.hash


def test_out_is_never_overwritten_by_accident(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = prepare([str(corpus)], out, BYTES, workers=1)
    before = (out / "train.tokens").stat().st_mtime_ns
    assert prepare([str(corpus)], out, BYTES, workers=1).hash == first.hash  # there already
    later = (out / "manifest.json").stat().st_mtime_ns + 1
    os.utime(corpus / "000.txt", ns=(later, later))
    with pytest.warns(UserWarning, match=r"was prepared before .*000\.txt was last written"):
        prepare([str(corpus)], out, BYTES, workers=1)
    assert (out / "train.tokens").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="--force"):
        prepare([str(corpus)], out, BYTES, valid=0.3, workers=1)
    other = prepare([str(corpus)], out, BYTES, valid=0.3, workers=1, force=True)
    assert read_manifest(out).hash == other.hash != first.hash
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="not a prepared corpus"):
        prepare([str(corpus)], tmp_path / "mine", BYTES, workers=1)
    (tmp_path / "mine" / "manifest.json").write_text('{"name": "a web page"}')
    with pytest.raises(ValueError, match="not a prepared corpus"):
        prepare([str(corpus)], tmp_path / "mine", BYTES, workers=1, force=True)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"
    (out / "manifest.json").write_text((out / "manifest.json").read_text()[:-20])  # damaged: it may be replaced
    assert prepare([str(corpus)], out, BYTES, workers=1, force=True).hash == first.hash
    assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus", "mine", "out"]


@pytest.mark.parametrize("force", [False, True])
def test_out_is_never_a_source(corpus: Path, tmp_path: Path, force: bool) -> None:
    (tmp_path / "link").symlink_to(corpus, target_is_directory=True)
    links, held = tmp_path / "links", tmp_path / "held.preparing"
    links.mkdir()
    (links / "000.txt").symlink_to(corpus / "000.txt")
    held.mkdir()
    (held / "a.txt").write_text("a source beside its target")
    before = {folder: folder_bytes(folder) for folder in (corpus, links, held)}
    for source, out in (
        (corpus, corpus),
        (corpus, tmp_path / "link"),
        (tmp_path / "link", corpus),
        (corpus, tmp_path),
        (corpus, tmp_path / "nowhere" / ".."),
        (corpus / "000.txt", corpus / "000.txt"),
        (links, links),  # the link itself lies there
        (links, corpus),  # what it leads to lies there
        (held, tmp_path / "held"),
    ):
        with pytest.raises(ValueError, match="contains a source, which would be overwritten: choose another --out"):
            prepare([str(source)], out, BYTES, workers=1, force=force)
    assert {folder: folder_bytes(folder) for folder in before} == before
    inside = corpus / "prepared"  # a new folder among the sources is no harm
    assert prepare([str(corpus)], inside, BYTES, workers=1).hash == read_manifest(inside).hash


def test_nothing_usable_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="1 invalid UTF-8"):
        prepare([str(tmp_path / "a.txt")], tmp_path / "out", BYTES, workers=1)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    with pytest.raises(ValueError, match="leave some for train"):
        check_shares(0.5, 0.5)


def test_damage_is_refused(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare([str(corpus)], out, BYTES, valid=0, workers=1)
    for name in ("train.tokens", "train.documents", "train.names"):
        path = out / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        with pytest.raises(ValueError, match=f"{name} has {len(whole) - 1} bytes instead of {len(whole)}"):
            open_dataset(out, verify=False)
        path.write_bytes(whole[:50] + bytes([whole[50] ^ 1]) + whole[51:])
        with pytest.raises(ValueError, match=f"{name} was altered"):
            open_dataset(out)
        path.unlink()
        with pytest.raises(ValueError, match=f"{name} is missing"):
            open_dataset(out)
        path.write_bytes(whole)
    open_dataset(out)
    with pytest.raises(ValueError, match="no split 'valid', only train"):
        open_dataset(out, "valid")
    manifest = out / "manifest.json"
    whole_text = manifest.read_text()
    for damaged, message in (
        (whole_text.replace('"documents": 60', '"documents": 61'), "was altered"),
        (whole_text[:-20], "is damaged"),
        ("{}", "is damaged"),
        (whole_text.replace('"gss-data"', '"other"'), "gss cannot read format"),
    ):
        manifest.write_text(damaged)
        with pytest.raises(ValueError, match=message):
            open_dataset(out)
    manifest.unlink()
    with pytest.raises(ValueError, match=r"no manifest\.json"):
        open_dataset(out)


def test_a_vocabulary_too_large_for_its_dtype(corpus: Path, tmp_path: Path) -> None:
    assert [token_dtype(size).itemsize for size in (257, 65536, 65537, 2**32)] == [2, 2, 4, 4]
    out = tmp_path / "out"
    manifest = prepare([str(corpus)], out, BYTES, valid=0, workers=1)
    content = dict(manifest.content)
    content["tokenizer"] = {**manifest.tokenizer, "vocab_size": 70_000}
    write_manifest(out, content)
    with pytest.raises(ValueError, match="70000 ids do not fit tokens of uint16"):
        open_dataset(out)
    for dtype in ("O", "float64", "<u2", 3, None):
        write_manifest(out, {**manifest.content, "dtype": dtype})
        with pytest.raises(ValueError, match="tokens are uint16 or uint32, not"):
            open_dataset(out)

    class Lying(ByteTokenizer):
        def encode(self, text: str) -> np.ndarray:  # type: ignore[type-arg]
            return np.asarray([257], np.uint32)

    with pytest.raises(ValueError, match="made id 257, outside its own size 257"):
        prepare([str(corpus)], tmp_path / "lying", Lying(), workers=1)


def test_32_bit_tokens(tmp_path: Path) -> None:
    import tokenizers

    vocabulary = {"</s>": 0, "<unk>": 1, "big": 70_000}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("big word")
    prepare([str(tmp_path / "a.txt")], tmp_path / "out", load_tokenizer(tmp_path / "tokenizer.json"), valid=0)
    dataset = open_dataset(tmp_path / "out")
    assert dataset.tokens.tolist() == [70_000, 1, 0]
    assert dataset.tokens.dtype == np.uint32


def _prepare_with_room_for(limit: int, corpus: str, out: str) -> None:
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        prepare([corpus], out, BYTES, options=SourceOptions(span_bytes=4000), workers=1)
    except OSError as error:
        os._exit(7 if "no space left" in str(error) and "run the same command again" in str(error) else 8)


@posix
@pytest.mark.parametrize("limit", [3_000, 20_000])
def test_a_disk_that_fills_up(corpus: Path, tmp_path: Path, limit: int) -> None:
    """The kernel refuses to write beyond the limit: first in a part, then in the merge."""
    prepare([str(corpus)], tmp_path / "whole", BYTES, workers=1)
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_prepare_with_room_for, args=(limit, str(corpus), str(tmp_path / "out")))
    process.start()
    process.join()
    assert process.exitcode == 7
    assert not (tmp_path / "out").exists()
    prepare([str(corpus)], tmp_path / "out", BYTES, options=SourceOptions(span_bytes=4000), workers=1)
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole")


@posix
def test_two_at_once_are_refused(corpus: Path, tmp_path: Path) -> None:
    import fcntl

    work = tmp_path / "out.preparing"
    work.mkdir()
    with open(work / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another gss prepare is running"):
            prepare([str(corpus)], tmp_path / "out", BYTES, workers=1)
    prepare([str(corpus)], tmp_path / "out", BYTES, workers=1)


def test_a_source_that_changed_is_read_again(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("gss.data.preparation._merge", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare([str(corpus)], out, BYTES, valid=0, workers=1)
    first = corpus / "000.txt"
    changed = first.read_text().swapcase()
    first.write_text(changed)
    os.utime(first, ns=(1, 1))
    prepare([str(corpus)], out, BYTES, valid=0, workers=1)
    assert contents(out)["train"]["corpus/000.txt"] == changed


def test_preparing_needs_no_torch(corpus: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from gss.data import prepare, load_tokenizer, open_dataset\n"
        f"prepare([{str(corpus)!r}], {str(tmp_path / 'out')!r}, load_tokenizer('bytes'), workers=1)\n"
        f"open_dataset({str(tmp_path / 'out')!r})\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def forge(out: Path, name: str, data: bytes, content: dict[str, Any]) -> None:
    """Replace a file of a corpus, and the manifest with one that fits it."""
    (out / name).write_bytes(data)
    files = content["splits"]["train"]["files"]
    files[name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    write_manifest(out, content)


def _without_one_fact(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A manifest's content with each of the facts that are read from it missing, or a list."""
    content = {**content, "left_out": {"empty": {"documents": 1, "first": ["one.txt"]}}}
    for place in ((), ("tokenizer",), ("splits", "train"), ("left_out", "empty")):
        for name in reduce(getitem, place, content).keys() - {"format", "version", "sources", "request"}:
            missing, list_ = copy.deepcopy(content), copy.deepcopy(content)
            del reduce(getitem, place, missing)[name]
            reduce(getitem, place, list_)[name] = [3]
            yield from (missing, list_)


def test_forged_corpora_are_refused(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    content = prepare([str(corpus)], out, BYTES, valid=0, workers=1).content
    index = np.fromfile(out / "train.documents", "<i8").reshape(5, -1)
    for place, value in ((0, -5), (0, 0), (7, int(index[0, 6])), (30, 1), (59, 10**9)):
        forged = index.copy()
        forged[0, place] = value
        forge(out, "train.documents", forged.tobytes(), copy.deepcopy(content))
        with pytest.raises(ValueError, match="does not match its tokens"):
            open_dataset(out, verify=False)
    for column in (1, 2):  # bytes and words, by which scores are divided
        forged = index.copy()
        forged[column, 5] = -1
        forge(out, "train.documents", forged.tobytes(), copy.deepcopy(content))
        with pytest.raises(ValueError, match="does not match its tokens"):
            open_dataset(out)
    forge(out, "train.documents", index.tobytes(), copy.deepcopy(content))
    names = (out / "train.names").read_bytes()
    forge(out, "train.names", names[: names.rindex(b"\n", 0, -1) + 1], copy.deepcopy(content))
    with pytest.raises(ValueError, match="names 59 documents instead of 60"):  # not one document fewer in silence
        list(open_dataset(out).documents())
    forge(out, "train.names", names, copy.deepcopy(content))
    tokens = np.fromfile(out / "train.tokens", "<u2")
    tokens[100] = 300
    forge(out, "train.tokens", tokens.tobytes(), copy.deepcopy(content))
    with pytest.raises(ValueError, match="token id 300 is outside the vocabulary of 257"):
        open_dataset(out)
    batches = Segments(open_dataset(out, verify=False), length=64, batch_size=4)
    with pytest.raises(ValueError, match="token id 300 is outside the vocabulary of 257"):
        list(map(batches.batch, range(batches.steps_per_epoch)))
    for forged_facts in ([], {"train": 3}, {"train": {**content["splits"]["train"], "files": ["train.tokens"]}}):
        write_manifest(out, {**content, "splits": forged_facts})
        with pytest.raises(ValueError, match="does not describe a corpus"):
            open_dataset(out)
    for forged in _without_one_fact(content):
        write_manifest(out, forged)
        with pytest.raises(ValueError, match=r"does not describe a corpus|tokens are uint16 or uint32"):
            read_manifest(out)
    (out / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="is damaged"):
        open_dataset(out)


def test_a_corpus_that_shrinks_under_a_run_is_an_error(corpus: Path, tmp_path: Path) -> None:
    prepare([str(corpus)], tmp_path / "out", BYTES, valid=0, workers=1)
    batches = Segments(open_dataset(tmp_path / "out"), length=64, batch_size=4)
    batches.batch(0)
    os.truncate(tmp_path / "out" / "train.tokens", 100)
    for read in (lambda: batches.batch(1), lambda: list(batches.dataset.documents())):
        with pytest.raises(ValueError, match="was truncated while it was in use"):
            read()


@pytest.mark.parametrize("span_bytes", [1 << 24, CHUNK])
def test_the_end_of_a_single_file_is_held_out(tmp_path: Path, span_bytes: int) -> None:
    text = "".join(make_text(seed, 5000) for seed in range(40))  # of several chunks
    (tmp_path / "book.txt").write_text(text)
    options = SourceOptions(span_bytes=span_bytes)
    prepare([str(tmp_path / "book.txt")], tmp_path / "out", BYTES, options=options, valid=0.2, test=0.1, workers=1)
    found = contents(tmp_path / "out")
    assert {split: list(documents) for split, documents in found.items()} == {
        "train": ["book.txt"],
        "valid": ["book.txt@valid"],
        "test": ["book.txt@test"],
    }
    sections = [next(iter(found[split].values())) for split in ("train", "valid", "test")]
    assert "".join(sections) == text
    assert all(section.endswith("\n") for section in sections)
    shares = [len(section.encode()) / len(text.encode()) for section in sections]
    assert shares == pytest.approx([0.7, 0.2, 0.1], abs=0.001)
    most = prepare([str(tmp_path / "book.txt")], tmp_path / "most", BYTES, valid=0.9, workers=1)
    assert most.splits["valid"]["bytes"] / len(text.encode()) == pytest.approx(0.9, abs=0.001)
    whole = prepare([str(tmp_path / "book.txt")], tmp_path / "whole", BYTES, valid=0, workers=1)
    assert whole.splits["train"]["documents"] == 1
    for name, line in (("words", "one line " * 5000), ("characters", "語" * 5000)):  # in the end anywhere
        (tmp_path / f"{name}.txt").write_text(line)
        parts = prepare([str(tmp_path / f"{name}.txt")], tmp_path / name, BYTES, valid=0.2, workers=1)
        assert parts.splits["valid"]["bytes"] / len(line.encode()) == pytest.approx(0.2, abs=0.001)
        kept = contents(tmp_path / name)
        assert "".join(text for split in ("train", "valid") for text in kept[split].values()) == line


@pytest.mark.parametrize(
    ("valid", "test", "small", "moved"),
    [(0.05, 0, "valid", "tale"), (1e-9, 0, "valid", "note"), (1 - 1e-9, 0, "train", "note"), (0.05, 0.05, "", "")],
)
def test_few_documents_are_in_every_split(tmp_path: Path, valid: float, test: float, small: str, moved: str) -> None:
    """A hash of so few may put none or all of them into a split; the one that is nearest to its share by length goes
    there, in the shares of several machines too."""
    lengths = {"note.txt": 10, "tale.txt": 3000, "book.txt": 50_000, "tome.txt": 90_000}
    texts = {name: make_text(seed, length) for seed, (name, length) in enumerate(lengths.items())}
    write_files(tmp_path / "corpus", {name: text.encode() for name, text in texts.items()})
    wanted = {"train", "valid"} | ({"test"} if test else set())
    prepare([str(tmp_path / "corpus")], tmp_path / "out", BYTES, valid=valid, test=test, workers=1)
    found = contents(tmp_path / "out")
    assert set(found) == wanted
    assert sorted(text for split in found.values() for text in split.values()) == sorted(texts.values())
    if small:
        assert list(found[small]) == [f"corpus/{moved}.txt"]
    for number in (1, 2):
        shared = {"share": (number, 2), "valid": valid, "test": test, "workers": 1}
        prepare([str(tmp_path / "corpus")], tmp_path / f"part-{number}", BYTES, **shared)
    merge_shares([str(tmp_path / "part-1"), str(tmp_path / "part-2")], tmp_path / "merged")
    assert contents(tmp_path / "merged") == found


def test_line_ends_and_byte_order_marks_of_windows(tmp_path: Path) -> None:
    """A text reads as on other systems, whatever the size of its spans; what is inside a row is left alone."""
    text = "".join(make_text(seed, 5000) for seed in range(20))
    assert len(text) > 2 * CHUNK
    windows = b"\xef\xbb\xbf" + text.encode().replace(b"\n", b"\r\n")
    write_files(tmp_path / "there", {"a.txt": windows, "rows.jsonl": b'\xef\xbb\xbf{"text": "a\\r\\nb"}\r\n'})
    for span_bytes in (1 << 24, CHUNK):
        options = SourceOptions(span_bytes=span_bytes)
        out = tmp_path / str(span_bytes)
        prepare([str(tmp_path / "there")], out, BYTES, options=options, valid=0, workers=1)
        assert contents(out)["train"] == {"there/a.txt": text, "there/rows.jsonl@0": "a\r\nb"}
    prepare([str(tmp_path / "there" / "a.txt")], tmp_path / "cut", BYTES, valid=0.5, workers=1)
    assert "".join(text for split in contents(tmp_path / "cut").values() for text in split.values()) == text


def test_the_current_folder_is_no_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_files(tmp_path / "c", {"a.txt": "some text\n" * 50})
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for make in (
        lambda: prepare([str(source)], ".", BYTES, workers=1),
        lambda: train_tokenizer([str(source)], ".", vocab_size=300),
        lambda: written_folder(Path()).__enter__(),
    ):
        with pytest.raises(ValueError, match=r"^\. cannot be replaced as a whole: name a folder inside it"):
            make()
    assert list(Path().iterdir()) == []
