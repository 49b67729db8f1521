"""The corpora of `experiments/quality.plan`, from archives of text.

    python -m experiments.corpora ARCHIVES --out DATA --vocabulary t5.model [--code-vocabulary DIR]

ARCHIVES holds books-train-0.tar.xz to -2, books-valid.tar.xz, code.tar.xz and math.tar.xz, with train/ and valid/
inside. DATA gets a folder of `gss prepare` for each corpus whose archives are all there: books, code and math in the
given vocabulary, and code-lossless in the one of --code-vocabulary (`gss tokenizer train` on code's train split).
Folders that exist are left alone, so you can run the command again when more archives have arrived. A folder appears
only when it is complete; `experiments.quality` waits for it.
"""

import argparse
import tarfile
import tempfile
import time
from pathlib import Path

from gss.data import SourceOptions, load_tokenizer, prepare

ARCHIVES = {
    "code": ("code",),
    "math": ("math",),
    "books": ("books-train-0", "books-train-1", "books-train-2", "books-valid"),
    "code-lossless": ("code",),
}


def make(name: str, archives: list[Path], vocabulary: Path, out: Path) -> str:
    """Prepare a corpus; returns a description of it."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".") as folder:
        text, unfinished = Path(folder, "text"), Path(folder, name)
        for archive in archives:
            with tarfile.open(archive) as members:
                members.extractall(text, filter="data")
        endings = {path.suffix for path in text.rglob("*") if path.is_file()}
        options = SourceOptions(suffixes=tuple(sorted(endings)))
        manifest = prepare([str(text)], unfinished, load_tokenizer(vocabulary), options=options)
        unfinished.rename(out / name)
    return ", ".join(f"{facts['tokens']:,} tokens of {split}" for split, facts in manifest.splits.items())


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archives", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocabulary", type=Path, required=True)
    parser.add_argument("--code-vocabulary", type=Path)
    given = parser.parse_args(arguments)
    for name, parts in ARCHIVES.items():
        vocabulary = given.code_vocabulary if name == "code-lossless" else given.vocabulary
        archives = [given.archives / f"{part}.tar.xz" for part in parts]
        lacking = [archive.name for archive in archives if not archive.is_file()]
        if (out := given.out / name).is_dir():
            print(f"{name}: there already")
        elif vocabulary is None:
            print(f"{name}: left out without --code-vocabulary")
        elif lacking:
            print(f"{name}: waits for {', '.join(lacking)}")
        else:
            started = time.monotonic()
            print(f"{name}: {make(name, archives, vocabulary, out.parent)} in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
