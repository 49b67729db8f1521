"""From a table to its trials: the corpora, and how a system is trained on one of them.

A trial's name is only for people: a stored result must have the same settings and the same hashes of tokens.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gss.config import override
from gss.data import open_dataset
from gss.data.shards import MANIFEST, read_manifest
from gss.reproduce.settings import Scale, System, Target, paper_corpus, preset_name, settings_of
from gss.training.config import TrainConfig, resolve

TRAIN, HELD_OUT = "train", "valid"
_LOG_LINES = 20
_CHECKPOINTS = 2  # unless the settings say otherwise
_LONG_NAME = 60  # characters of changed settings; more become a hash


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus with a held-out split."""

    name: str
    folder: Path
    vocab_size: int
    lossless: bool
    identity: Mapping[str, str]
    """Hashes of the vocabulary and of both splits' tokens, which do not depend on where the text was prepared."""
    held_out_tokens: int
    train_tokens: int
    held_out: tuple[tuple[int, int], ...] = ()
    """(tokens, bytes of text) of every held-out document, in order."""

    def whole_documents(self, text_bytes: int | None) -> int | None:
        """Tokens of the first held-out documents that together have this many bytes of text; None: all of them."""
        tokens, read = 0, 0
        for count, size in self.held_out:
            if text_bytes is not None and read >= text_bytes:
                return tokens
            tokens, read = tokens + count, read + size
        return None

    @property
    def paper(self) -> str | None:
        """The paper's corpus that it stands for."""
        return paper_corpus(self.name)


@dataclass(frozen=True)
class Trial:
    """One system on one corpus with one seed."""

    system: System
    scale: Scale
    corpus: Corpus
    config: TrainConfig
    evaluate_tokens: int | None
    changed: tuple[str, ...] = ()
    """Settings changed by the user, `key=value`."""

    @property
    def name(self) -> str:
        """The name of its run folder, without slashes."""
        changes = "".join(f".{change}" for change in self.changed)
        if len(changes) > _LONG_NAME or "/" in changes:
            changes = f".{hashlib.sha256(changes.encode()).hexdigest()[:8]}"
        seed, steps = self.config.seed, self.config.steps
        return f"{self.corpus.name}.{self.system.name}.{self.scale.name}.{steps}steps.seed{seed}{changes}"

    @property
    def tokens(self) -> int:
        return self.config.steps * self.config.batch_tokens

    @property
    def scored_tokens(self) -> int:
        """Tokens that are scored at each evaluation length."""
        return min(self.evaluate_tokens or self.corpus.held_out_tokens, self.corpus.held_out_tokens)


def find_corpora(folders: Sequence[Path], names: Sequence[str] = ()) -> list[Corpus]:
    """The corpora in these folders, each of which is one or holds some; `names` selects among them, in order."""
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
    held_out = open_dataset(folder, HELD_OUT, verify=False)
    return Corpus(
        name=folder.resolve().name,
        folder=folder,
        vocab_size=manifest.tokenizer["vocab_size"],
        lossless=not manifest.tokenizer["losses"],
        identity={"tokenizer": manifest.tokenizer["hash"], **tokens},
        held_out_tokens=manifest.splits[HELD_OUT]["tokens"],
        train_tokens=manifest.splits[TRAIN]["tokens"],
        held_out=tuple(zip(held_out.lengths.tolist(), held_out.document_bytes.tolist(), strict=True)),
    )


def planned(
    target: Target,
    scale: Scale,
    corpora: Sequence[Corpus],
    *,
    only: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
    **options: Any,
) -> list[Trial]:
    """Every trial of a table: all systems with the first seed, then with the second; options are of `trial_of`."""
    known = [system.name for system in target.systems]
    unknown = [name for name in only if name not in known]
    if unknown:
        raise ValueError(f"{target.name} has no system {unknown[0]!r}; it has: {', '.join(known)}")
    if not seeds:
        raise ValueError("no seeds: give at least one, for example --seeds 0")
    return [
        trial_of(system, scale, corpus, seed, **options)
        for seed in seeds
        for corpus in corpora
        for system in target.systems
        if not only or system.name in only
    ]


def trial_of(
    system: System,
    scale: Scale,
    corpus: Corpus,
    seed: int = 0,
    tokens: int | None = None,
    evaluate_tokens: int | None = None,
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> Trial:
    """A system's trial on a corpus; `changes` override all other settings."""
    for option, value in (("--tokens", tokens), ("--evaluate-tokens", evaluate_tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{option} must be at least 1, not {value}")
    if "seed" in changes:
        raise ValueError("give seeds with --seeds, not with --set seed")
    settings = {**settings_of(system, scale, corpus.paper), **changes, "seed": seed}
    config = override(resolve(preset_name(system, scale, corpus.paper), vocab_size=corpus.vocab_size), settings)
    wanted = tokens or scale.tokens
    if "steps" not in changes and wanted:
        config = replace(config, steps=max(1, round(wanted / config.batch_tokens)))
    steps = config.steps
    habits = {
        "report.log_every": max(1, min(100, steps // _LOG_LINES)),
        "checkpoint.every": scale.settings.get("checkpoint.every", max(1, min(1000, steps // _CHECKPOINTS))),
        "optimizer.warmup_steps": min(config.optimizer.warmup_steps, max(1, steps // 8)),
    }
    config = override(config, {**habits, **changes})
    changed = tuple(f"{key}={value}" for key, value in sorted(changes.items()))
    return Trial(
        system, scale, corpus, config, evaluate_tokens or corpus.whole_documents(scale.evaluate_bytes), changed
    )
