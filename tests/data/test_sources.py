"""Sources: every format and compression gives the same documents; splits by name; bad rows counted and named."""

import gzip
import json
import lzma
import os
import random
from pathlib import Path

import pytest
from data_corpora import contents, make_text, prepared, write_files

from gss.data import SourceOptions, load_tokenizer, prepare, read_manifest
from gss.data.chunks import CHUNK
from gss.data.sources import split_of_name

BYTES = load_tokenizer("bytes")


def compress(path: Path, data: bytes, ending: str) -> Path:
    target = path.with_name(path.name + ending)
    if ending == ".gz":
        target.write_bytes(gzip.compress(data))
    elif ending == ".xz":
        target.write_bytes(lzma.compress(data))
    elif ending == ".zst":
        import pyarrow

        target.write_bytes(pyarrow.Codec("zstd").compress(data, asbytes=True))
    else:
        target.write_bytes(data)
    return target


@pytest.mark.parametrize("ending", ["", ".gz", ".xz", ".zst"])
def test_text_files_are_documents(tmp_path: Path, texts: list[str], ending: str) -> None:
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    for number, text in enumerate(texts):
        where = folder / "deep" if number % 2 else folder
        compress(where / f"{number}.txt", text.encode(), ending)
    (folder / "README.rst").write_text("not a document")
    write_files(folder, {".hidden.txt": "not a document", ".venv/licenses/MIT.txt": "not a document"})
    found = prepared(folder, tmp_path / "out")
    assert sorted(text for split in found.values() for text in split.values()) == sorted(texts)
    assert f"corpus/deep/1.txt{ending}" in {name for split in found.values() for name in split}


@pytest.mark.parametrize("ending", ["", ".gz", ".xz", ".zst"])
@pytest.mark.parametrize("span_bytes", [1000, 1 << 24])
def test_jsonl_rows_are_documents(tmp_path: Path, texts: list[str], ending: str, span_bytes: int) -> None:
    lines = "".join(json.dumps({"id": i, "body": text}) + "\n" for i, text in enumerate(texts))
    source = compress(tmp_path / "rows.jsonl", lines.encode(), ending)
    found = prepared(source, tmp_path / "out", field="body", span_bytes=span_bytes)
    assert sorted(text for split in found.values() for text in split.values()) == sorted(texts)


def test_endings_in_capitals(tmp_path: Path, texts: list[str]) -> None:
    folder = tmp_path / "c"
    folder.mkdir()
    for number, ending in enumerate((".GZ", ".Xz", ".ZST")):
        compress(folder / f"{number}.TXT", texts[number].encode(), ending.lower()).rename(
            folder / f"{number}.TXT{ending}"
        )
    (folder / "3.md").write_text(texts[3])
    (folder / "4.MD").write_text(texts[4])
    # So short pieces that a compressed file taken for a plain one would be cut.
    found = prepared(folder, tmp_path / "out", suffixes=(".Md",), span_bytes=100)
    assert sorted(text for split in found.values() for text in split.values()) == sorted(texts[:5])


def test_a_mark_of_byte_order_is_no_part_of_a_row(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "first"}\n{"text": "\ufeffsecond"}\n', encoding="utf-8-sig")
    found = prepared(tmp_path / "rows.jsonl", tmp_path / "out")
    assert sorted(text for split in found.values() for text in split.values()) == ["first", "\ufeffsecond"]
    assert read_manifest(tmp_path / "out").left_out == {}


def test_parquet_rows_are_documents(tmp_path: Path, texts: list[str]) -> None:
    import pyarrow.parquet

    table = pyarrow.table({"n": list(range(len(texts) + 1)), "text": [*texts, None]})
    pyarrow.parquet.write_table(table, tmp_path / "train-00000-of-00001.parquet", row_group_size=7)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["held out"]}), tmp_path / "validation.parquet")
    found = prepared(tmp_path, tmp_path / "out")
    assert list(found["train"].values()) == texts
    assert list(found["valid"].values()) == ["held out"]
    assert read_manifest(tmp_path / "out").left_out["no text field"]["documents"] == 1
    with pytest.raises(ValueError, match="no column 'body', only n, text: choose with --field"):
        prepared(tmp_path, tmp_path / "other", field="body")


def test_a_parquet_row_that_is_not_utf8_is_left_out_alone(tmp_path: Path) -> None:
    import pyarrow.parquet

    stored = pyarrow.array([b"first", b"\xff", b"third"], pyarrow.binary())
    text = pyarrow.StringArray.from_buffers(3, *stored.buffers()[1:])
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), tmp_path / "rows.parquet")
    found = prepared(tmp_path / "rows.parquet", tmp_path / "out")
    assert sorted(text for split in found.values() for text in split.values()) == ["first", "third"]
    left_out = {"invalid UTF-8": {"documents": 1, "first": ["rows.parquet@0.1"]}}
    assert read_manifest(tmp_path / "out").left_out == left_out


def test_a_long_text_is_one_document_however_it_is_stored(tmp_path: Path) -> None:
    chooser = random.Random(0)
    text = "".join("é" * chooser.randrange(70) + "\n" for _ in range(5 * CHUNK // 70))
    for name in ("plain", "packed"):
        (tmp_path / name).mkdir()
    (tmp_path / "plain" / "long.txt").write_text(text, newline="")
    compress(tmp_path / "packed" / "long.txt", text.encode(), ".gz")
    out, whole = tmp_path / "out", tmp_path / "whole"
    options = SourceOptions(span_bytes=CHUNK)
    prepare([str(tmp_path / "plain")], out, BYTES, options=options, valid=0, workers=1)
    assert contents(out) == {"train": {"plain/long.txt": text}}
    prepare([str(tmp_path / "plain")], whole, BYTES, valid=0, workers=1)
    assert (whole / "train.tokens").read_bytes() == (out / "train.tokens").read_bytes()
    # Its identity is that of its contents: the compressed copy, read at a stretch, is a duplicate.
    sources = [str(tmp_path / "plain"), str(tmp_path / "packed")]
    both = prepare(sources, tmp_path / "both", BYTES, options=options, valid=0, workers=1)
    assert both.splits["train"]["documents"] == 1
    assert both.left_out["duplicate"]["first"] == ["packed/long.txt.gz"]


def test_own_splits_and_hash_splits(tmp_path: Path, texts: list[str]) -> None:
    splits = ["train"] * 40 + ["validation"] * 10 + ["test"] * 10
    write_files(tmp_path / "c", {f"{split}/{number}.txt": texts[number] for number, split in enumerate(splits)})
    own = prepared(tmp_path / "c", tmp_path / "own")
    assert {split: len(documents) for split, documents in own.items()} == {"train": 40, "valid": 10, "test": 10}
    options = SourceOptions(splits="hash")
    manifest = prepare([str(tmp_path / "c")], tmp_path / "hash", BYTES, options=options, valid=0.3, test=0.3, workers=1)
    by_hash = contents(tmp_path / "hash")
    everything = [text for split in by_hash.values() for text in split.values()]
    assert sorted(everything) == sorted(texts)
    assert len(set(everything)) == len(everything)
    assert all(8 < facts["documents"] < 35 for facts in manifest.splits.values())
    (tmp_path / "c" / "stray.txt").write_text("no split")
    with pytest.raises(ValueError, match=r"stray\.txt is in no split"):
        prepared(tmp_path / "c", tmp_path / "no", splits="own")


def test_a_document_keeps_its_split_when_others_come_and_go(tmp_path: Path, texts: list[str]) -> None:
    where: list[dict[str, str]] = []
    for name, chosen in (("all", texts), ("few", texts[::-3])):
        write_files(tmp_path / name, {f"{number}.txt": text for number, text in enumerate(chosen)})
        prepare([str(tmp_path / name)], tmp_path / f"{name}.out", BYTES, valid=0.4, workers=1)
        found = contents(tmp_path / f"{name}.out")
        where.append({text: split for split, documents in found.items() for text in documents.values()})
    assert where[1].items() <= where[0].items()
    assert set(where[1].values()) == {"train", "valid"}


def test_names_tell_splits() -> None:
    assert split_of_name("c/train/a.txt") == "train"
    assert split_of_name("c/validation.jsonl") == "valid"
    assert split_of_name("c/test-00001-of-00002.parquet") == "test"
    assert split_of_name("c/trainer.txt") is None
    assert split_of_name("c/a.txt") is None


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.rst").write_text("x")
    for source, message in (
        ("nowhere", "it is not a file, a folder or one of stdlib"),
        ("empty", "has no .txt"),
        ("a.rst", "add --suffix .rst"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare([str(tmp_path / source)], tmp_path / "out", BYTES)
    with pytest.raises(ValueError, match="cannot be combined"):
        prepare(["stdlib", str(tmp_path)], tmp_path / "out", BYTES)
    with pytest.raises(ValueError, match="--from is for recipes"):
        prepare([str(tmp_path / "empty")], tmp_path / "out", BYTES, options=SourceOptions(local="x"))
    assert contents_of(tmp_path) == ["a.rst", "empty"]
    found = prepared(tmp_path / "a.rst", tmp_path / "out", suffixes=(".rst",))
    assert [text for split in found.values() for text in split.values()] == ["x"]


def contents_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_bad_documents_are_counted_and_named(tmp_path: Path) -> None:
    good = make_text(1, 50)
    rows = [b'{"text": "a row"}', b'{"text": 3}', b'{"other": "x"}', b"{torn", b'"\xff"', b'{"text": "\\ud800"}', b""]
    files = {
        "good.txt": good,
        "latin.txt": "é".encode("latin-1"),
        "late.txt": b"fine\n" * CHUNK + b"\xff",  # bad after a block that was tokenised already
        "empty.txt": b"",
        "blank.txt": b" \n\n\t",
        "binary.txt": b"ELF\0\1\2",
        "cut.txt.gz": gzip.compress(good.encode() * 50)[:-20],
        "wrong.txt.xz": b"not xz at all",
        "bad.zst.txt.zst": b"not zst at all",
        "torn.parquet": b"PAR1 torn",
        "rows.jsonl": b"\n".join(rows) + b"\n",
    }
    folder = write_files(tmp_path / "c", files)
    torn = compress(folder / "torn.txt", (good * 50).encode(), ".zst")
    torn.write_bytes(torn.read_bytes()[:-10])
    found = prepared(folder, tmp_path / "out")
    assert sorted(text for split in found.values() for text in split.values()) == sorted([good, "a row"])
    left_out = read_manifest(tmp_path / "out").left_out
    assert {reason: entry["documents"] for reason, entry in left_out.items()} == {
        "empty": 2,
        "binary": 1,
        "invalid UTF-8": 4,
        "invalid JSON": 1,
        "no text field": 2,
        "unreadable": 5,
    }
    assert "c/binary.txt" in left_out["binary"]["first"]
    assert "c/late.txt" in left_out["invalid UTF-8"]["first"]


def test_bad_documents_never_end_the_preparation(tmp_path: Path) -> None:
    import pyarrow.parquet

    folder = tmp_path / "c"
    folder.mkdir()
    (folder / "good.txt").write_text("good")
    (folder / "blank.txt").write_bytes(b" \n" * (2 * CHUNK))  # read in several pieces, none of which knows the others
    (folder / "rows.jsonl").write_text('{"n": ' + "9" * 5000 + ', "text": "x"}\n')
    pyarrow.parquet.write_table(pyarrow.table({"text": ["row"]}), folder / "footer.parquet")
    whole = (folder / "footer.parquet").read_bytes()
    start = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    (folder / "footer.parquet").write_bytes(whole[:start] + b"\xff" * (len(whole) - 8 - start) + whole[-8:])
    found = prepared(folder, tmp_path / "out", span_bytes=CHUNK)
    assert [text for split in found.values() for text in split.values()] == ["good"]
    assert read_manifest(tmp_path / "out").left_out == {
        "empty": {"documents": 1, "first": ["c/blank.txt"]},
        "invalid JSON": {"documents": 1, "first": ["c/rows.jsonl@0"]},
        "unreadable": {"documents": 1, "first": ["c/footer.parquet"]},
    }


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    (folder / "été.txt").write_text("good")
    (folder / os.fsdecode(b"\xff.txt")).write_bytes(b"\0")
    found = prepared(folder, tmp_path / "out")
    assert [name for split in found.values() for name in split] == ["caf\\xe9/été.txt"]
    manifest = read_manifest(tmp_path / "out")
    assert manifest.left_out["binary"]["first"] == ["caf\\xe9/\\xff.txt"]
    assert manifest.content["sources"] == [str(folder)]


def test_rows_too_long_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gss.data.formats.MAX_ROW", 100)
    lines = [json.dumps({"text": text}) for text in ("one", "x" * 500, "two")]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    found = prepared(tmp_path / "rows.jsonl", tmp_path / "out")
    assert sorted(text for split in found.values() for text in split.values()) == ["one", "two"]
    assert read_manifest(tmp_path / "out").left_out["row too long"]["documents"] == 1
