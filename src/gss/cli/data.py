"""Commands on corpora: prepare, merge, data, tokenizer."""

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from gss import box
from gss.cli.shared import Force, print_table, share_bar

if TYPE_CHECKING:
    from gss.data import Manifest, SourceOptions

# A group of one command would be that command, but for a callback.
tokenizer_app = typer.Typer(help="Make vocabularies.", no_args_is_help=True, callback=lambda: None)

Sources = Annotated[
    list[str],
    Argument(
        help="Files or folders of .txt, .jsonl, .parquet (plain, .gz, .xz, .zst), their URLs (s3://, gs://, https://, "
        "hf://datasets/…); or one recipe: stdlib, pg19, lm1b, arxiv, github."
    ),
]
Local = Annotated[
    str | None,
    Option("--from", help="The recipe's corpus: a folder or a URL. Default: pg19 and lm1b come from the hub."),
]
Suffix = Annotated[list[str] | None, Option("--suffix", help="Another text file extension, such as .tex; repeatable.")]
_SPLITS = "own: by folder or file names; hash: by a hash of each document; auto: own if every file has a split."
Field = Annotated[str, Option("--field", help="The field or column that holds the text.")]


def prepare_command(
    source: Sources,
    out: Annotated[Path, Option(help="The folder to create; it appears only when it is complete.")],
    tokenizer: Annotated[
        str, Option("--tokenizer", "-t", help="bytes, box, a tokenizer.json, a SentencePiece .model, or a folder.")
    ] = "bytes",
    eos: Annotated[str | None, Option(help="The end-of-document token, if the vocabulary does not define it.")] = None,
    local: Local = None,
    splits: Annotated[str, Option(help=_SPLITS)] = "auto",
    valid: Annotated[float, Option(help="Share of documents held out for validation, chosen by hash.")] = 0.05,
    test: Annotated[float, Option(help="Share of documents held out for testing, chosen by hash.")] = 0.0,
    suffix: Suffix = None,
    field: Field = "text",
    part: Annotated[str, Option(metavar="I/N", help="Prepare only part I of N, for gss merge.")] = "1/1",
    workers: Annotated[int | None, Option("--workers", "-j", min=1, help="Processes. Default: one per core.")] = None,
    force: Force = False,
) -> None:
    """Tokenize a corpus into memory-mapped shards. If it is interrupted, the same command continues."""
    from gss.data import load_tokenizer, prepare
    from gss.data.sources import unread_endings

    options = _source_options(local, suffix, field, splits)
    vocabulary = load_tokenizer(box.folder() if tokenizer == "box" else tokenizer, eos)
    number, _, machines = part.partition("/")
    if not (number.isdecimal() and machines.isdecimal()):
        raise ValueError(f"--part must be I/N, for example 2/3, not {part!r}")
    with share_bar("tokenizing") as show:
        manifest = prepare(
            source,
            out,
            vocabulary,
            options=options,
            valid=valid,
            test=test,
            share=(int(number), int(machines)),
            workers=workers,
            force=force,
            progress=lambda done, total: show("tokenizing", done / total if total else 1.0),
        )
    unread = unread_endings(source, options)
    if unread:
        endings = ", ".join(f"{count:,} {ending}" for ending, count in list(unread.items())[:5])
        print(f"note: files that were not read: {endings}; if they are text, add --suffix .EXT")
    if int(machines) > 1:
        print(f"prepared part {part} in {out}; when all {machines} are done, run: gss merge PART... --out DIR")
    else:
        _print_prepared(manifest, out, valid)


def merge_command(
    part: Annotated[list[str], Argument(help="Folders made by gss prepare --part, or their URLs, in any order.")],
    out: Annotated[Path, Option(help="The folder to create; it appears only when it is complete.")],
    force: Force = False,
) -> None:
    """Merge the parts prepared on several machines into one corpus, byte for byte what one machine would make."""
    from gss.data import merge_shares

    _print_prepared(merge_shares(part, out, force=force), out)


def _print_prepared(manifest: "Manifest", out: Path, valid: float = 1.0) -> None:
    _print_facts(manifest)
    documents = sum(facts["documents"] for facts in manifest.splits.values())
    if "train" not in manifest.splits:
        print("note: the files name no split train, and none is left to train on; --splits hash ignores the names")
    elif valid and "valid" not in manifest.splits:
        named = "the files name no split valid; --splits hash ignores the names"
        reason = named if documents > 1 else "of a single document, only that of a plain text file has its end held out"
        print(f"note: nothing is held out for validation: {reason}")
    print(f"prepared {out} (hash {manifest.hash[:12]}); to inspect it: gss data {out}")


def data_command(
    folder: Annotated[Path, Argument(help="A folder made by gss prepare.")],
    sample: Annotated[int, Option(help="Index of the document to show the beginning of.")] = 0,
) -> None:
    """Show the counts, document lengths and a sample of a prepared corpus, and verify all its hashes."""
    import numpy as np

    from gss.data import open_dataset, read_manifest

    manifest = read_manifest(folder)
    splits = [open_dataset(folder, split) for split in manifest.splits]
    shown = splits[0]
    if not 0 <= sample < len(shown):
        raise ValueError(f"--sample {sample}: documents of {shown.split} are numbered from 0 to {len(shown) - 1:,}")
    _print_facts(manifest)
    for split in splits:
        print(f"\n{split.split}: document lengths in tokens (median {int(np.median(split.lengths)):,})")
        exponents = np.frexp(split.lengths.astype(np.float64))[1]  # e for lengths from 2^(e-1) to 2^e - 1
        counts = np.bincount(exponents)
        for exponent in range(int(exponents.min()), len(counts)):
            documents = int(counts[exponent])
            drawn = "█" * round(40 * documents / counts.max()) or ("▏" if documents else "")
            print(f"{1 << exponent - 1:>12,} to {(1 << exponent) - 1:<12,} {documents:>10,} {drawn}")
    document = next(islice(shown.documents(), sample, None))
    print(f"\nsample: the beginning of document {document.name} in {shown.split}, decoded:\n")
    text = shown.tokenizer().decode(document.tokens[:120])
    print("\n".join(f"  | {line}" for line in text.splitlines()), end="\n\n")
    print(f"all hashes verified; manifest {manifest.hash}")


@tokenizer_app.command("train")
def train_command(
    source: Sources,
    out: Annotated[Path, Option(help="The folder to create.")],
    vocab_size: Annotated[int, Option(help="Number of pieces; the paper's LM1B vocabulary has 30000.")] = 30_000,
    model: Annotated[str, Option(help="unigram or bpe.")] = "unigram",
    max_bytes: Annotated[int, Option(min=1, help="Maximum bytes of text to train on.")] = 200_000_000,
    local: Local = None,
    suffix: Suffix = None,
    field: Field = "text",
    threads: Annotated[int | None, Option(min=1, help="Number of threads. Default: all cores.")] = None,
    force: Force = False,
) -> None:
    """Train a lossless SentencePiece vocabulary, which keeps whitespace and uses bytes for rare characters."""
    from gss.data.tokenizer_training import train_tokenizer

    options = _source_options(local, suffix, field, "auto")
    with share_bar("reading") as show:
        trained = train_tokenizer(
            source,
            out,
            vocab_size=vocab_size,
            model=model,
            options=options,
            max_bytes=max_bytes,
            threads=threads,
            force=force,
            progress=show,
        )
    if trained.vocab_size < vocab_size:
        print(f"note: the text yields only {trained.vocab_size} pieces, not {vocab_size}")
    print(f"trained {out}: {trained.vocab_size:,} pieces, lossless (hash {trained.hash[:12]})")


def _source_options(local: str | None, suffix: list[str] | None, field: str, splits: str) -> "SourceOptions":
    from gss.data import SourceOptions

    endings = tuple(ending if ending.startswith(".") else f".{ending}" for ending in suffix or ())
    return SourceOptions(local=local, suffixes=endings, field=field, splits=splits)


def _print_facts(manifest: "Manifest") -> None:
    """Counts, the vocabulary, and what was left out."""
    lines = {
        "documents": ("documents", ","),
        "tokens, with the ends of documents": ("tokens", ","),
        "bytes": ("bytes", ","),
        "words": ("words", ","),
        "tokens per byte": ("tokens_per_byte", ".4f"),
        "tokens per word": ("tokens_per_word", ".3f"),
        "tokens of the longest document": ("longest", ","),
        "entropy of unigrams, nats per token": ("unigram_entropy", ".3f"),
    }
    splits = manifest.splits
    rows = [[line, *(f"{facts[key]:{form}}" for facts in splits.values())] for line, (key, form) in lines.items()]
    print_table(None, ["split", *splits], rows)
    facts, losses = manifest.tokenizer, ", ".join(manifest.tokenizer["losses"])
    kept = f"LOSSY: it changes or drops {losses}, so decoded text may differ from the original"
    kept = kept if losses else "lossless: decoding gives back any text exactly"
    print(f"vocabulary: {facts['kind']}, {facts['vocab_size']:,} ids, hash {facts['hash'][:12]}; {kept}")
    for reason, entry in manifest.left_out.items():
        first = ", ".join(entry["first"][:3])
        more = ", ..." if entry["documents"] > 3 else ""
        print(f"left out: {entry['documents']:,} {reason} ({first}{more})")
