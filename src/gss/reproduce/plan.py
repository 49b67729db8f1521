"""From a target to its runs: which corpora are there, and what each system's run on one of them is.

A run's name says what it is to people; whether a kept result is that run's is decided by all of its settings and by
the hashes of the tokens, not by the name.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gss.config import override
from gss.data.manifest import COLUMNS, MANIFEST, read_manifest
from gss.reproduce.settings import Scale, System, Target, paper_corpus, preset_name, settings_of
from gss.train.config import TrainConfig, resolve

TRAIN, HELD_OUT = "train", "valid"
_LOG_LINES = 20  # of progress a run, where it is not a terminal's single one
_CHECKPOINTS = 2  # a run, where the scale does not say; a signal to stop adds one
_LONG_NAME = 60  # characters of changed settings; more become a hash
_ENDS, _BYTES = COLUMNS.index("ends"), COLUMNS.index("bytes")
_DIGEST = [COLUMNS.index("digest_low"), COLUMNS.index("digest_high")]


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus with a held-out split."""

    name: str
    folder: Path
    vocab_size: int
    lossless: bool
    identity: Mapping[str, str]
    """Hashes of the vocabulary and of both splits' tokens: the same text prepared elsewhere has the same."""
    held_out_text: str
    """A hash of the held-out documents' texts in order, whatever the vocabulary: the same where bits a byte compare."""
    held_out_tokens: int
    train_tokens: int
    train_bytes: int
    held_out: tuple[tuple[int, int], ...] = ()
    """(tokens, bytes of text) of every held-out document, in order."""

    def whole_documents(self, text_bytes: int | None) -> int | None:
        """Tokens of the first held-out documents that together have so many bytes of text; None for all of them."""
        tokens, read = 0, 0
        for count, size in self.held_out:
            if text_bytes is not None and read >= text_bytes:
                return tokens
            tokens, read = tokens + count, read + size
        return None

    @property
    def paper(self) -> str | None:
        """The corpus of the paper that it stands for."""
        return paper_corpus(self.name)


@dataclass(frozen=True)
class Run:
    """One system on one corpus with one seed."""

    system: System
    scale: Scale
    corpus: Corpus
    config: TrainConfig
    evaluate_tokens: int | None
    changed: tuple[str, ...] = ()
    """Settings that the user changed, `key=value`."""

    @property
    def name(self) -> str:
        """For its file and its folder; has no slash in it."""
        changes = "".join(f".{change}" for change in self.changed)
        if len(changes) > _LONG_NAME or "/" in changes:
            changes = f".{hashlib.sha256(changes.encode()).hexdigest()[:8]}"
        seed, steps = self.config.seed, self.config.steps
        return f"{self.corpus.name}.{self.system.name}.{self.scale.name}.{steps}steps.seed{seed}{changes}"

    @property
    def tokens(self) -> int:
        """That training sees."""
        return self.config.steps * self.config.batch_tokens

    @property
    def scored_tokens(self) -> int:
        """That one length of the evaluation scores."""
        return min(self.evaluate_tokens or self.corpus.held_out_tokens, self.corpus.held_out_tokens)


def find_corpora(folders: Sequence[Path], names: Sequence[str] = ()) -> list[Corpus]:
    """The prepared corpora in these folders: each is one, or holds some. `names` chooses among them, in its order."""
    found: dict[str, Path] = {}
    for folder in folders:
        inside = [folder] if (folder / MANIFEST).is_file() else sorted(p.parent for p in folder.glob(f"*/{MANIFEST}"))
        if not inside:
            raise ValueError(f"{folder} neither is a prepared corpus nor holds one: make one with gss prepare")
        for path in inside:
            name = path.resolve().name
            if found.setdefault(name, path) != path:
                raise ValueError(f"two corpora are named {name}: {found[name]} and {path}")
    unknown = [name for name in names if name not in found]
    if unknown:
        raise ValueError(f"there is no corpus {unknown[0]!r} in the data; there are: {', '.join(found)}")
    return [_corpus(found[name]) for name in names or found]


def _corpus(folder: Path) -> Corpus:
    manifest = read_manifest(folder)
    missing = [split for split in (TRAIN, HELD_OUT) if split not in manifest.splits]
    if missing:
        raise ValueError(f"{folder} has no split {missing[0]!r}: prepare it with a share held out (--valid)")
    tokens = {split: manifest.splits[split]["files"][f"{split}.tokens"]["sha256"] for split in (TRAIN, HELD_OUT)}
    columns = _held_out_columns(folder, manifest.splits[HELD_OUT]["documents"])
    return Corpus(
        name=folder.resolve().name,
        folder=folder,
        vocab_size=manifest.tokenizer["vocab_size"],
        lossless=not manifest.tokenizer["losses"],
        identity={"tokenizer": manifest.tokenizer["hash"], **tokens},
        held_out_text=hashlib.sha256(columns[_DIGEST].T.tobytes()).hexdigest(),
        held_out_tokens=manifest.splits[HELD_OUT]["tokens"],
        train_tokens=manifest.splits[TRAIN]["tokens"],
        train_bytes=manifest.splits[TRAIN]["bytes"],
        held_out=tuple(zip(np.diff(columns[_ENDS], prepend=0).tolist(), columns[_BYTES].tolist(), strict=True)),
    )


def _held_out_columns(folder: Path, documents: int) -> npt.NDArray[np.int64]:
    """The index of the held-out documents, a row a column of it. Their order is that of their names."""
    path = folder / f"{HELD_OUT}.documents"
    if not path.is_file() or path.stat().st_size != 8 * len(COLUMNS) * documents:
        raise ValueError(f"{path} is missing or cut short: prepare the corpus anew")
    return np.fromfile(path, "<i8").reshape(len(COLUMNS), documents)


def chosen(target: Target, only: Sequence[str]) -> list[System]:
    """The target's systems, or those named, in the table's order."""
    known = {system.name for system in target.systems}
    unknown = [name for name in only if name not in known]
    if unknown:
        raise ValueError(
            f"{target.name} has no system {unknown[0]!r}; it has: {', '.join(s.name for s in target.systems)}"
        )
    return [system for system in target.systems if not only or system.name in only]


def planned(
    target: Target,
    scale: Scale,
    corpora: Sequence[Corpus],
    *,
    only: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
    tokens: int | None = None,
    evaluate_tokens: int | None = None,
    changes: Mapping[str, Any] | None = None,
) -> list[Run]:
    """Every run of a target: the first seed of all systems, then the second of all, and so on."""
    if not seeds:
        raise ValueError("no seeds: give at least one, for example --seeds 0")
    if tokens is not None and tokens < 1:
        raise ValueError(f"--tokens must be at least 1, not {tokens}")
    if evaluate_tokens is not None and evaluate_tokens < 1:
        raise ValueError(f"--evaluate-tokens must be at least 1, not {evaluate_tokens}")
    if "seed" in (changes or {}):
        raise ValueError("give seeds with --seeds, not with --set seed")
    if evaluate_tokens is not None and target.layout == "vocabulary":
        raise ValueError("vocabularies are compared on whole documents: so many tokens of each would be other texts")
    systems = chosen(target, only)
    return [
        run_of(system, scale, corpus, seed, tokens, evaluate_tokens, changes or {})
        for seed in seeds
        for corpus in corpora
        for system in systems
    ]


def run_of(
    system: System,
    scale: Scale,
    corpus: Corpus,
    seed: int = 0,
    tokens: int | None = None,
    evaluate_tokens: int | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Run:
    """A system's run on a corpus; `changes` to its settings win over all others."""
    name = preset_name(system, scale, corpus.paper)
    settings = {**settings_of(system, scale, corpus.paper), **(changes or {}), "seed": seed}
    config = override(resolve(name, vocab_size=corpus.vocab_size), settings)
    if "steps" not in settings:
        wanted = tokens or scale.corpus_tokens.get(corpus.paper or "", scale.tokens)
        config = replace(config, steps=max(1, round(wanted / config.batch_tokens)))
    config = override(config, _habits(config.steps, settings))
    changed = tuple(f"{key}={value}" for key, value in sorted((changes or {}).items()))
    scored = evaluate_tokens or corpus.whole_documents(scale.evaluate_bytes)
    return Run(system, scale, corpus, config, scored, changed)


def _habits(steps: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """How often a run speaks and saves, by its length; never more warm-up than a tenth of it where it is short."""
    habits: dict[str, Any] = {
        "report.log_every": max(1, min(100, steps // _LOG_LINES)),
        "checkpoint.every": settings.get("checkpoint.every", max(1, min(1000, steps // _CHECKPOINTS))),
        "optimizer.warmup_steps": min(settings.get("optimizer.warmup_steps", steps), max(1, steps // 8)),
    }
    return habits


def toml(run: Run) -> str:
    """The run as a file for `gss train --config`: what differs from the library's defaults by decision."""
    settings = settings_of(run.system, run.scale, run.corpus.paper)
    settings |= dict(change.split("=", 1) for change in run.changed)
    settings |= {"steps": run.config.steps, "seed": run.config.seed}
    settings |= {key: _get(run.config, key) for key in settings}
    lines = [f"preset = {_toml_value(run.config.preset)}"]
    lines += [f"{key} = {_toml_value(value)}" for key, value in sorted(settings.items())]
    return "\n".join(lines) + "\n"


def _get(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml_value, value))}]"
    if value is None:
        return '"none"'  # TOML has no null; the config knows the word
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def by_system(runs: Sequence[Run]) -> Iterator[tuple[Corpus, System, list[Run]]]:
    """Runs that differ in the seed alone, together, in the order of corpora and systems."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.corpus.name, run.system.name), []).append(run)
    order = list(dict.fromkeys(run.corpus.name for run in runs))
    for (_, _), members in sorted(groups.items(), key=lambda group: order.index(group[0][0])):
        yield members[0].corpus, members[0].system, members
