"""Recipes, on small corpora in each published format."""

import gzip
import io
import sysconfig
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
from data_corpora import contents, prepared, write_files

from gss.data import load_tokenizer, prepare, read_manifest, sources

BYTES = load_tokenizer("bytes")


def test_pg19_as_published(tmp_path: Path, texts: list[str]) -> None:
    splits = ["train"] * 20 + ["validation"] * 5 + ["test"] * 5
    files = {f"{split}/{number}.txt": texts[number] for number, split in enumerate(splits)}
    root = write_files(tmp_path / "pg19", {**files, "metadata.csv": "0,A Title,1900,link\n"})
    found = prepared("pg19", tmp_path / "out", local=str(root))
    assert set(found["train"].values()) == set(texts[:20])
    assert set(found["valid"].values()) == set(texts[20:25])
    assert found["test"]["pg19/test/29.txt"] == texts[29]
    with pytest.raises(ValueError, match="is not PG-19"):
        prepared("pg19", tmp_path / "no", local=str(tmp_path / "out"))


def test_lm1b_as_published(tmp_path: Path) -> None:
    train, held = (f"{name}-monolingual.tokenized.shuffled/news.en" for name in ("training", "heldout"))
    files = {
        f"{train}-00001-of-00100": "First sentence .\nSecond one .\nFirst sentence .\n",
        f"{train}-00002-of-00100": "Third one .\n",
        f"{held}.heldout-00000-of-00050": "Held out .\nThird one .\n",
    }
    write_files(tmp_path / "1-billion-word-language-modeling-benchmark-r13output", files)
    found = prepared("lm1b", tmp_path / "out", local=str(tmp_path))
    assert list(found["train"].values()) == ["First sentence .", "Second one ."]
    assert list(found["valid"].values()) == ["Held out .", "Third one ."]  # the held-out set stays whole
    assert read_manifest(tmp_path / "out").left_out["duplicate"]["documents"] == 2


@pytest.mark.parametrize(("recipe", "splits"), [("pg19", ("train", "validation", "test")), ("lm1b", ("train", "test"))])
def test_tables_of_the_hub(
    tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch, recipe: str, splits: tuple[str, ...]
) -> None:
    pytest.importorskip("huggingface_hub")
    import pyarrow.parquet

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub = tmp_path / "hub"
    hub.mkdir()
    for number, split in enumerate(splits):
        rows = texts[number * 10 : number * 10 + 10]
        pyarrow.parquet.write_table(pyarrow.table({"text": rows}), hub / f"{split}-00000-of-00001.parquet")
    monkeypatch.setitem(sources._HUB, recipe, f"file://{hub}")
    found = prepared(recipe, tmp_path / "out", span_bytes=3000)
    assert list(found["train"].values()) == texts[:10]
    assert list(found["valid"].values()) == texts[10:20]
    with pytest.raises(ValueError, match="give a local copy with --from"):
        prepared(recipe, tmp_path / "no", local="hf://datasets/no-such-user/nothing")


def article(main: str, **files: str) -> dict[str, bytes]:
    return {"main.tex": main.encode(), **{name.replace("__", "/") + ".tex": f.encode() for name, f in files.items()}}


def test_arxiv_articles(tmp_path: Path) -> None:
    main = "\\documentclass{article}\n\\begin{document}\n%\\input{intro}\n\\input{parts/intro} and \\include{end}\n"
    main += "\\input missing\n\\end{document}\n"
    latin1 = "\\documentclass{a}\\usepackage[latin1]{inputenc} é".encode("latin-1")
    plain = {
        "1001.0001/paper.tex": main,
        "1001.0001/parts/intro.tex": "An intro. \\input{parts/deep}\n",
        "1001.0001/parts/deep.tex": "Deep \\input{paper} 50\\% \\input{end}",
        "1001.0001/end.tex": "The end.",
        "1001.0001/figure.pdf": b"\0\1\2",
        "1001.0004.gz": gzip.compress(b"\\documentclass{a} one file"),
        "1001.0005.gz": gzip.compress(latin1),
        "1001.0006.gz": gzip.compress(b"\\documentclass{a} \xff"),
        "1001.0007.tar.gz": b"torn",
    }
    root = write_files(tmp_path / "arxiv", plain)
    whole = (
        "\\documentclass{article}\n\\begin{document}\n%\\input{intro}\n"
        "An intro. Deep \\input{paper} 50\\% The end.\n and The end.\n\\input missing\n\\end{document}\n"
    )
    files = article("\\documentclass{a}\n\\input{s}\n", s="from a tar")
    with tarfile.open(root / "1001.0002.tar.gz", "w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    with zipfile.ZipFile(root / "1001.0003.zip", "w") as archive:
        for name, content in article("\\documentclass{a} \\input{../x}", other="\\section{never included}").items():
            archive.writestr(name, content)
    (root / "1001.0008").mkdir()
    found = prepared("arxiv", tmp_path / "out", local=str(root))
    documents = {name: text for split in found.values() for name, text in split.items()}
    assert documents == {
        "1001.0001": whole,
        "1001.0002.tar.gz": "\\documentclass{a}\nfrom a tar\n",
        "1001.0003.zip": "\\documentclass{a} \\input{../x}",
        "1001.0004.gz": "\\documentclass{a} one file",
        "1001.0005.gz": "\\documentclass{a}\\usepackage[latin1]{inputenc} é",
    }
    left_out = read_manifest(tmp_path / "out").left_out
    assert left_out["invalid UTF-8"]["first"] == ["1001.0006.gz"]
    assert left_out["unreadable"]["first"] == ["1001.0007.tar.gz"]
    assert left_out["no source file"]["first"] == ["1001.0008"]


def test_articles_that_expand_without_end_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gss.data.latex.MAX_ARTICLE", 1 << 17)
    root = tmp_path / "arxiv"
    articles = {
        "good": [f"\\input{{f{number + 1}}}" for number in range(20)] + ["the bottom"],
        "doubled": [f"{'text ' * 200}\\input{{f{number + 1}}}\\input{{f{number + 1}}}\n" for number in range(13)],
        "empty": [f"\\input{{f{number + 1}}}\\input{{f{number + 1}}}" for number in range(30)] + [""],
        "deep": [f"\\input{{f{number + 1}}}" for number in range(1200)],
    }
    for name, parts in articles.items():
        files = {f"f{number}.tex": text for number, text in enumerate(parts)}
        write_files(root / name, {"main.tex": "\\documentclass{a} \\input{f0}", **files})
    found = prepared("arxiv", tmp_path / "out", local=str(root))
    assert [documents for split in found.values() for documents in split.items()] == [
        ("good", "\\documentclass{a} the bottom")
    ]
    left_out = read_manifest(tmp_path / "out").left_out
    assert left_out == {"row too long": {"documents": 3, "first": ["deep", "doubled", "empty"]}}


def test_an_encrypted_archive_is_left_out(tmp_path: Path) -> None:
    root = tmp_path / "arxiv"
    root.mkdir()
    (root / "good.gz").write_bytes(gzip.compress(b"\\documentclass{a} one file"))
    with zipfile.ZipFile(root / "locked.zip", "w") as archive:
        archive.writestr("main.tex", "\\documentclass{a}")
    raw = bytearray((root / "locked.zip").read_bytes())
    raw[raw.index(b"PK\3\4") + 6] |= 1  # the flag of encryption, in both of the entry's headers
    raw[raw.index(b"PK\1\2") + 8] |= 1
    (root / "locked.zip").write_bytes(raw)
    prepared("arxiv", tmp_path / "out", local=str(root))
    assert read_manifest(tmp_path / "out").left_out == {"unreadable": {"documents": 1, "first": ["locked.zip"]}}


def test_github_repositories(tmp_path: Path) -> None:
    files = {
        "one/a.py": "print(1)",
        "one/b/main.go": "package main\n",
        "one/b/x.ts": "let x: number;\n",
        "one/c.cpp": "int c;\n",
        "one/d.h": "int d;\n",
        "one/E.java": "class E {}\n",
        "one/README.md": "no source\n",
        "one/vendor/v.go": "package vendored\n",
        "one/node_modules/m/i.ts": "let vendored;\n",
        "one/.git/hook.py": "hidden\n",
        "one/api_pb2.py": "generated = 1\n",
        "one/zz_generated.go": "package generated\n",
        "one/gen_mark.go": "// Code generated by stringer; DO NOT EDIT.\npackage g\n",
        "one/minified.ts": "x=1;" * 500,
        "two/only.c": "int two;\n",
        "none/readme.txt": "nothing\n",
        "one/binary.c": b"\0\1",
        "one/latin.c": b"// \xe9\n",
    }
    found = prepared("github", tmp_path / "out", local=str(write_files(tmp_path / "repositories", files)))
    documents = {name: text for split in found.values() for name, text in split.items()}
    assert documents == {
        "one": "class E {}\nprint(1)\nint c;\nint d;\npackage main\nlet x: number;\n",
        "two": "int two;\n",
    }
    assert read_manifest(tmp_path / "out").left_out["empty"]["first"] == ["none"]


def test_github_splits_by_folders(tmp_path: Path) -> None:
    write_files(tmp_path / "g", {f"{split}/repository/a.py": f"split = '{split}'\n" for split in ("train", "valid")})
    found = prepared("github", tmp_path / "out", local=str(tmp_path / "g"))
    assert found["valid"] == {"valid/repository": "split = 'valid'\n"}
    with pytest.raises(ValueError, match="--from FOLDER"):
        prepared("github", tmp_path / "no")


def test_stdlib(tmp_path: Path) -> None:
    manifest = prepare(["stdlib"], tmp_path / "out", BYTES, workers=2)
    found = contents(tmp_path / "out")
    documents = {name: text for split in found.values() for name, text in split.items()}
    assert documents["bisect"] == Path(sysconfig.get_path("stdlib"), "bisect.py").read_text(encoding="utf-8")
    assert "class JSONDecoder" in documents["json"]
    assert "class JSONEncoder" in documents["json"]
    assert "test" not in documents
    assert manifest.splits["train"]["tokens"] > 5_000_000
    assert manifest.splits["valid"]["documents"] >= 1


def test_hostile_articles_take_no_time_and_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "arxiv"
    root.mkdir()
    spaces = "\\documentclass{a}\n\\input{" + " " * 300_000 + "x\n" + "\\input" + " " * 300_000 + "\n"
    (root / "spaces.gz").write_bytes(gzip.compress(spaces.encode()))
    for name, kind in (
        ("pax", tarfile.XHDTYPE),
        ("long", tarfile.GNUTYPE_LONGNAME),
        ("sparse", tarfile.GNUTYPE_SPARSE),
    ):
        header = tarfile.TarInfo("x")
        header.type, header.size = kind, 1 << 30
        bomb = header.tobuf(tarfile.USTAR_FORMAT) + bytes(1 << 20)
        (root / f"{name}.tar.gz").write_bytes(gzip.compress(bomb))
    with tarfile.open(root / "crowd.tar.gz", "w:gz", compresslevel=1) as tar:
        for number in range(300):
            folder = tarfile.TarInfo(f"folder-{number}")
            folder.type = tarfile.DIRTYPE
            tar.addfile(folder)
    monkeypatch.setattr("gss.data.latex._SMALLEST", 1 << 18)  # so that fewer entries are too many
    started = time.monotonic()
    found = prepared("arxiv", tmp_path / "out", local=str(root))
    assert time.monotonic() - started < 10
    assert [text for split in found.values() for text in split.values()] == [spaces]
    left_out = read_manifest(tmp_path / "out").left_out
    assert left_out["unreadable"]["documents"] == 3
    assert left_out["row too long"]["first"] == ["crowd.tar.gz"]


def test_names_of_included_files_may_be_quoted(tmp_path: Path) -> None:
    main = '\\documentclass{a} \\input{ "two words" } \\input { two} \\input{a"b} \\input{} \\input  two'
    write_files(tmp_path / "arxiv" / "one", {"main.tex": main, "two words.tex": "(1)", "two.tex": "(2)"})
    found = prepared("arxiv", tmp_path / "out", local=str(tmp_path / "arxiv"))
    whole = '\\documentclass{a} (1) (2) \\input{a"b} \\input{} (2)'
    assert [text for split in found.values() for text in split.values()] == [whole]
