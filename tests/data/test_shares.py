"""Corpora that outgrow one machine: parts made apart and merged, and sources read from URLs, give the same bytes."""

import builtins
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from data_corpora import folder_bytes, make_text
from fsspec.registry import known_implementations

from gss.data import SourceOptions, load_tokenizer, merge_shares, open_dataset, preparation, prepare
from gss.data.chunks import CHUNK
from gss.data.shards import SHARE_FORMAT, read_sealed, write_manifest
from gss.data.tokenizer import SentencePieceTokenizer
from tests.making import call

BYTES = load_tokenizer("bytes")
OPTIONS = SourceOptions(span_bytes=CHUNK)  # several parts, and a document that reaches over some of them
HELD_OUT = {"valid": 0.2, "test": 0.1}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import pyarrow.parquet

    folder = tmp_path_factory.mktemp("shares") / "corpus"
    (folder / "deep").mkdir(parents=True)
    for seed in range(30):
        (folder / f"{seed:02d}.txt").write_text(make_text(seed, 800))
    (folder / "long.txt").write_text("".join(make_text(seed, 3000) for seed in range(4 * CHUNK // 22_000)))
    (folder / "bad.txt").write_bytes(b"\xff")
    shutil.copy(folder / "07.txt", folder / "deep" / "copy.txt")
    rows = pyarrow.table({"text": [make_text(seed, 30) for seed in range(100, 140)]})
    pyarrow.parquet.write_table(rows, folder / "deep" / "rows.parquet", row_group_size=9)
    return folder


def prepare_share(corpus: Path | str, out: Path, number: int, of: int = 3, **more: Any) -> None:
    prepare([str(corpus)], out, BYTES, options=OPTIONS, **HELD_OUT, share=(number, of), workers=1, **more)


def test_three_parts_made_apart_and_merged(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each machine has its own copy of the sources and is interrupted at every part; the merge is, too."""
    monkeypatch.chdir(corpus.parent)
    one = prepare(["corpus"], tmp_path / "one", BYTES, options=OPTIONS, **HELD_OUT, workers=1)

    def dying(name: str) -> Callable[..., Any]:
        original = getattr(preparation, name)

        def call(*arguments: Any) -> Any:
            original(*arguments)
            raise KeyboardInterrupt

        return call

    for number in (2, 3, 1):
        machine = tmp_path / f"machine-{number}"
        shutil.copytree(corpus, machine / "corpus")
        monkeypatch.chdir(machine)
        for made in (1, 2):
            with monkeypatch.context() as patched:
                patched.setattr(preparation, "write_part", dying("write_part"))
                with pytest.raises(KeyboardInterrupt):
                    prepare_share("corpus", Path("share"), number)
            assert not Path("share").exists()
            assert len(list(Path("share.preparing").glob("share/part-*"))) == made  # the one before is kept
        prepare_share("corpus", Path("share"), number)
        assert [path.name for path in machine.iterdir() if path.name.startswith("share")] == ["share"]
    shares = [str(tmp_path / f"machine-{number}" / "share") for number in (3, 1, 2)]
    for name in ("merge_parts", "write_manifest"):
        with monkeypatch.context() as patched:
            patched.setattr(preparation, name, dying(name))
            with pytest.raises(KeyboardInterrupt):
                merge_shares(shares, tmp_path / "merged")
        assert not (tmp_path / "merged").exists()
    merged = merge_shares(shares, tmp_path / "merged")
    assert merged.hash == one.hash
    assert folder_bytes(tmp_path / "merged") == folder_bytes(tmp_path / "one")
    assert merge_shares(shares, tmp_path / "merged").hash == one.hash  # there already
    assert not (tmp_path / "merged.preparing").exists()
    assert one.splits["train"]["longest"] > 3 * CHUNK
    assert one.left_out["duplicate"]["documents"] == 1


def test_each_token_is_read_once(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2):
        prepare_share(corpus, tmp_path / str(number), number, 2)
    read: list[int] = []
    opened = builtins.open

    def watched(path: Any, *arguments: Any, **more: Any) -> Any:
        file = opened(path, *arguments, **more)
        if not str(path).endswith("tokens.bin"):
            return file

        class Watched:
            def __enter__(self) -> "Watched":
                return self

            def __exit__(self, *error: object) -> None:
                file.close()

            def seek(self, *place: int) -> int:
                return int(file.seek(*place))

            def read(self, size: int) -> bytes:
                data = file.read(size)
                read.append(len(data))
                return bytes(data)

        return Watched()

    monkeypatch.setattr(builtins, "open", watched)
    merge_shares([str(tmp_path / "1"), str(tmp_path / "2")], tmp_path / "out")
    monkeypatch.undo()
    stored = sum(path.stat().st_size for path in tmp_path.glob("[12]/part-*/tokens.bin"))
    assert sum(read) == stored > 2 * CHUNK


def test_what_does_not_belong_together_is_refused(corpus: Path, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        prepare_share(corpus, tmp_path / str(number), number)
    prepare_share(corpus, tmp_path / "1", 1)  # there already
    with pytest.raises(ValueError, match="holds a corpus that was prepared differently"):
        prepare_share(corpus, tmp_path / "1", 2)
    other = SourceOptions(span_bytes=CHUNK, splits="hash")
    prepare([str(corpus)], tmp_path / "other", BYTES, options=other, **HELD_OUT, share=(3, 3), workers=1)
    prepare([str(corpus)], tmp_path / "whole", BYTES, **HELD_OUT, workers=1)
    one, two, three, whole = (str(tmp_path / name) for name in ("1", "2", "3", "whole"))
    out = tmp_path / "out"
    for shares, message in (
        ([one, two], "a corpus of 3 parts needs each of them once, but these are 1/3, 2/3"),
        ([one, two, three, two], "these are 1/3, 2/3, 2/3, 3/3"),
        ([one, two, str(tmp_path / "other")], "are not parts of one corpus"),
        ([one, whole], "belongs to a whole corpus"),
        ([one, str(corpus)], "is missing: this is not a folder that gss prepare made"),
        ([], "name the folders"),
    ):
        with pytest.raises(ValueError, match=message):
            merge_shares(shares, out)
    with pytest.raises(ValueError, match="one part of a corpus: merge all parts with gss merge"):
        open_dataset(one)
    for bad in ((0, 3), (4, 3)):
        with pytest.raises(ValueError, match="parts are numbered from 1/3 to 3/3"):
            prepare([str(corpus)], tmp_path / "no", BYTES, share=bad)
    sealed = read_sealed(f"{three}/manifest.json", SHARE_FORMAT).content
    counts: list[dict[str, object]] = [{"parts": wrong} for wrong in (10**12, None, float(sealed["parts"]))]
    for forged in (*counts, {"share": [3]}, {"share": "33"}, {"held_out": [2, 0]}):
        write_manifest(Path(three), {**sealed, **forged})
        with pytest.raises(ValueError, match="is not a valid part of a corpus"):
            merge_shares([one, two, three], out)
    write_manifest(Path(three), sealed)
    records = sorted((tmp_path / "2").glob("part-*/records.bin"))[0]
    whole = records.read_bytes()
    for place in (-1, -3):  # whether the last chunk ends its document, and the reason to skip it
        altered = bytearray(whole)
        altered[place] ^= 0x40 if place == -3 else 1
        records.write_bytes(altered)
        with pytest.raises(ValueError, match=r"records\.bin has been altered: copy this part again"):
            merge_shares([one, two, three], out)
    records.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"records\.bin has been altered"):
        merge_shares([one, two, three], out)
    records.write_bytes(whole)
    for share in ("1", "2", "3"):
        names = max(path for path in (tmp_path / share).glob("part-*/names.jsonl") if path.stat().st_size)
        whole = names.read_bytes()
        for cut in (whole[:-3], b"".join(whole.splitlines(True)[:-1]), whole + b'"another"\n'):
            names.write_bytes(cut)
            with pytest.raises(ValueError, match=r"names\.jsonl has been altered: copy this part again"):
                merge_shares([one, two, three], out)
        names.write_bytes(whole)
    tokens = sorted((tmp_path / "2").glob("part-*/tokens.bin"))[0]
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"tokens\.bin has been altered: copy this part again"):
        merge_shares([one, two, three], out)
    assert not out.exists()


def test_urls_give_what_a_disk_gives(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: dict[str, SentencePieceTokenizer]
) -> None:
    """Sources and parts in object storage: fsspec's own, in memory."""
    storage = fsspec.filesystem("memory")
    storage.put(str(corpus), "/bucket/corpus", recursive=True)
    tokenizer = trained["unigram"]
    disk = prepare([str(corpus)], tmp_path / "disk", tokenizer, options=OPTIONS, **HELD_OUT, workers=1)
    url = "memory://bucket/corpus"
    prepare([url], tmp_path / "url", tokenizer, options=OPTIONS, **HELD_OUT, workers=1)
    shares = []
    for number in (1, 2):
        own = tmp_path / f"share-{number}"
        prepare([url], own, tokenizer, options=OPTIONS, **HELD_OUT, share=(number, 2), workers=1)
        shares.append(f"memory://bucket/shares/{number}")
        storage.put(str(own), f"/bucket/shares/{number}", recursive=True)
    merged = merge_shares(shares, tmp_path / "merged")
    assert folder_bytes(tmp_path / "merged") == folder_bytes(tmp_path / "url")
    assert merged.content == {**disk.content, "sources": [url]}
    alone = prepare([f"{url}/long.txt"], tmp_path / "alone", BYTES, valid=0.5, workers=1)
    assert set(alone.splits) == {"train", "valid"}
    with pytest.raises(ValueError, match=r"memory://bucket/nothing has no \.txt"):
        prepare(["memory://bucket/nothing"], tmp_path / "no", BYTES)


def test_missing_extras_and_failing_storage_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(fsspec.AbstractFileSystem):
        protocol = "failing"

        def info(self, path: str, **more: Any) -> dict[str, Any]:
            return {"name": path, "size": 100, "type": "file"}

        def _open(self, path: str, *arguments: Any, **more: Any) -> Any:
            raise ConnectionResetError("the storage went away")

    fsspec.register_implementation("failing", Failing, clobber=True)
    with pytest.raises(ConnectionResetError, match="went away"):  # not a document that is left out in silence
        prepare(["failing://bucket/a.jsonl"], tmp_path / "out", BYTES, workers=1)
    monkeypatch.setitem(known_implementations, "gs", {"class": "nowhere.GS", "err": "Install gcsfs"})
    with pytest.raises(ValueError, match=r"gs://bucket/a\.txt needs the extra 'remote': pip install"):
        prepare(["gs://bucket/a.txt"], tmp_path / "out", BYTES)


def test_commands(corpus: Path, tmp_path: Path) -> None:
    parts = [tmp_path / "1of2", tmp_path / "2of2"]
    for number, out in enumerate(parts, start=1):
        printed = call("prepare", corpus, "--out", out, "--part", f"{number}/2", "-j", 1)
        assert f"prepared part {number}/2 in" in printed
    printed = call("merge", *parts, "--out", tmp_path / "out")
    assert "left out: 1 duplicate (corpus/deep/copy.txt)" in printed
    assert "to inspect it: gss data" in printed
    with pytest.raises(ValueError, match="for example 2/3, not 'two'"):
        call("prepare", corpus, "--out", tmp_path / "no", "--part", "two")
