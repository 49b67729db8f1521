"""LaTeX articles: one document from a folder or an archive, with included files inserted in their places.

Reads `.tar`, compressed tars, `.zip`, and arXiv's single gzipped `.tex`. Nothing is unpacked to disk, so paths in a
hostile archive have no effect. Independent of splits and tokens.
"""

import gzip
import posixpath
import re
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from gss.data import chunks
from gss.data.chunks import Skip

Entry = TypeVar("Entry")
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".zip", ".gz")
MAX_ARTICLE = 1 << 26  # bytes of LaTeX; more than any article, so that an archive bomb ends here
MAX_HEADER = 1 << 16  # bytes of a tar's longer names and attributes
MAX_DEPTH = 32  # files that include one another; TeX itself allows about half as many
_SMALLEST = 512  # bytes that a file counts for at least, so that millions of empty ones end, too

_SOURCES = (".tex", ".ltx", ".latex")
_INCLUDED = (*_SOURCES, ".sty", ".cls", ".bbl", ".tikz", ".pgf")
_COMMENT = re.compile(r"(?<!\\)(?:\\\\)*%")
# Linear in the text: what may stand around the name between the braces is taken off afterwards.
_INCLUDE = re.compile(r"\\(?:input|include|subfile)(?:\s*\{([^{}]*)\}|\s+([^\s{}\\%]+))")
_MAIN_NAMES = ("main", "ms", "paper", "article", "root")
_LATIN1 = re.compile(rb"\\usepackage\s*\[\s*(?:latin1|latin9|ansinew|cp1252)\s*\]\s*\{inputenc\}")


def article_text(path: Path) -> str:
    """The article as one text; Skip where there is no LaTeX, or it cannot be read."""
    try:
        files = dict(_files(path))
    except (tarfile.TarError, zipfile.BadZipFile, RuntimeError) as error:
        # zipfile raises RuntimeError for encryption and for a compression that it does not know.
        raise Skip(chunks.UNREADABLE) from error
    main = _main_file(files)
    latin1 = _LATIN1.search(files[main]) is not None
    texts = {name: _decode(content, latin1) for name, content in files.items()}
    return "".join(_resolve((main,), texts, [0]))


def _files(path: Path) -> Iterator[tuple[str, bytes]]:
    """The names and contents of the files of an article in a folder or an archive."""
    if path.is_dir():
        found = [file for file in sorted(path.rglob("*")) if file.is_file() and not file.is_symlink()]
        for name, file in _bounded((file.relative_to(path).as_posix(), file.stat().st_size, file) for file in found):
            yield name, file.read_bytes()
        return
    if path.name.lower().endswith(".zip"):
        with zipfile.ZipFile(path) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
            for name, entry in _bounded((entry.filename, entry.file_size, entry) for entry in entries):
                yield posixpath.normpath(name), archive.read(entry)
        return
    try:
        with tarfile.open(path, "r:*", tarinfo=_BoundedHeader) as tar:
            members = ((member.name if member.isfile() else "", member.size, member) for member in tar)
            for name, member in _bounded(members):
                if content := tar.extractfile(member):
                    yield posixpath.normpath(name), content.read()
    except tarfile.ReadError:
        # arXiv gives an article of one file as that file, gzipped under the article's number.
        if not path.name.lower().endswith(".gz") or path.name.lower().endswith(".tar.gz"):
            raise
        with gzip.open(path, "rb") as stream:
            whole = stream.read(MAX_ARTICLE + 1)
        _check_size(len(whole))
        yield "main.tex", whole


def _bounded(files: Iterable[tuple[str, int, Entry]]) -> Iterator[tuple[str, Entry]]:
    """The files that may be part of the article, as long as there are neither too many entries nor too much of it."""
    total = 0
    for name, size, entry in files:
        wanted = name.lower().endswith(_INCLUDED)
        total += max(_SMALLEST, size if wanted else 0)
        _check_size(total)
        if wanted:
            yield name, entry


class _BoundedHeader(tarfile.TarInfo):
    """A member of an archive. The library reads headers of headers whole, whatever size they claim."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_BoundedHeader":
        header = super().frombuf(buf, encoding, errors)
        names = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
        longer = (*names, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
        # A sparse file is a chain of headers without end.
        if header.type == tarfile.GNUTYPE_SPARSE or (header.type in longer and header.size > MAX_HEADER):
            raise Skip(chunks.UNREADABLE)
        return header


def _check_size(total: int) -> None:
    if total > MAX_ARTICLE:
        raise Skip(chunks.ROW_TOO_LONG)


def _decode(content: bytes, latin1: bool) -> str | None:
    """A file's text, in the encoding that the article declares; None where it is not text."""
    if b"\0" in content:
        return None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return content.decode("cp1252", errors="replace") if latin1 else None


def _main_file(files: dict[str, bytes]) -> str:
    """The file that makes the article: it has a document class; by name, then by size, where several do."""
    sources = {name: content for name, content in files.items() if name.lower().endswith(_SOURCES)}
    if not sources:
        raise Skip(chunks.NO_SOURCE)
    complete = {n: c for n, c in sources.items() if b"\\documentclass" in c or b"\\documentstyle" in c}

    def preference(name: str) -> tuple[bool, int, int, int, str]:
        stem = posixpath.splitext(posixpath.basename(name))[0].lower()
        named = _MAIN_NAMES.index(stem) if stem in _MAIN_NAMES else len(_MAIN_NAMES)
        subfile = b"{subfiles}" in files[name]  # a chapter that can also stand alone is not the article
        return subfile, name.count("/"), named, -len(files[name]), name

    return min(complete or sources, key=preference)


def _resolve(above: tuple[str, ...], texts: dict[str, str | None], size: list[int]) -> Iterator[str]:
    """A file's text with its inclusions in place; one that is missing or includes itself stays as it is written.

    `above` ends with the file and begins with the main one. `size` holds the bytes of the files put in place so far,
    each counted as often as it is included.
    """
    text = texts[above[-1]]
    if text is None:
        raise Skip(chunks.INVALID_UTF8)
    size[0] += max(_SMALLEST, len(text.encode("utf-8")))
    _check_size(size[0])
    if len(above) > MAX_DEPTH:
        raise Skip(chunks.ROW_TOO_LONG)
    for line in text.splitlines(keepends=True):
        comment = _COMMENT.search(line)
        code = line[: comment.start()] if comment else line
        position = 0
        for found in _INCLUDE.finditer(code):
            wanted = found.group(2) or (found.group(1) or "").strip().removeprefix('"').removesuffix('"')
            # From the main file's folder as TeX does, else from the including one's.
            folders = [posixpath.dirname(above[0]), posixpath.dirname(above[-1])]
            names = [posixpath.join(folder, wanted + suffix) for folder in folders for suffix in ("", *_SOURCES)]
            target = next((name for name in map(posixpath.normpath, names) if name in texts), None)
            if not wanted or '"' in wanted or target is None or target in above:
                continue
            yield line[position : found.start()]
            yield from _resolve((*above, target), texts, size)
            position = found.end()
        yield line[position:]
