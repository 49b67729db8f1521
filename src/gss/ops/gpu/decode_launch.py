"""The residual stream of a batch of rows on a GPU, and the kernel launches that layers of all kinds share.

One row and several rows use different kernels (`decode`, `decode_batch`), and only this module decides which. A layer's
plan (`gss.nn.gpu_plans`) says what is launched for a token; a decoder captures those launches as a CUDA graph. `Tiles`
says how the kernels are divided into programs.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from gss.ops.gpu import decode, decode_batch

Pair = tuple[Tensor, Tensor]
"""A weight and its bias, or a norm's scale and shift."""

DRAFT = 8
"""Tokens of one row that are read at once: the next, and drafted ones after it."""

HISTORY = 1 << 16
"""Tokens that drafts are looked up in."""

_MOST_COUNTERS = 256
_MOST_NEW = 64  # tokens that are drawn before the host counts them, at most


@dataclass(frozen=True, kw_only=True)
class Tile:
    """How one kernel is cut up; sizes are powers of two, and larger than the work is harmless."""

    rows: int
    """Rows of the weight (of the state, in the fold; keys at a time, in attention) per program."""
    depth: int = 64
    """Columns of the weight at a time (modes, in the fold), where a program does not take all at once."""
    warps: int = 4
    """Warps per program."""
    stages: int = 3
    """Loads in flight in the loop over columns."""
    columns: int = 64
    """Most sequences per program, in the kernels for several: 16, 32 or 64."""

    def rows_of(self, width: int) -> int:
        """The rows, fewer where a row is so wide that registers would not hold them."""
        return max(1, min(self.rows, 2**12 * self.warps // triton.next_power_of_2(width)))

    def columns_of(self, batch: int) -> int:
        """The sequences per program, for a batch of this size."""
        return max(16, min(self.columns, triton.next_power_of_2(batch)))


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """The tiles of every kernel, the fastest found for the 192M preset on an H200; `for_batch` has those of a batch."""

    gate_one: Tile = Tile(rows=8, warps=2)
    context_one: Tile = Tile(rows=16)
    output_one: Tile = Tile(rows=4, depth=4096)
    head_one: Tile = Tile(rows=16)
    gate_many: Tile = Tile(rows=64, depth=128, stages=4)
    context_many: Tile = Tile(rows=64, columns=16)
    output_many: Tile = Tile(rows=64, depth=128, stages=4)
    head_many: Tile = Tile(rows=128, depth=64, stages=4)
    attend: Tile = Tile(rows=64)
    attended_one: Tile = Tile(rows=8, warps=8)
    fold: Tile = Tile(rows=64, depth=16)
    splits: int = 8
    """Parts that a sum over a width is cut into: a batch's output product, the keys that one sequence attends to."""
    channels: int = 32
    """Rows of the state space per program of `earlier_outputs`."""
    fold_precision: str = "bf16x3"
    """Of the fold's products, in Triton's names: tf32x3 has float32's accuracy, nearly; bf16x3 16 bits of it."""
    overlap: bool = True
    """Whether a kernel loads weights before the one before has ended; needs compute capability 9."""

    def attention_slices(self, chunk: int, batch: int) -> tuple[int, int]:
        """How a chunk's keys are cut: keys per slice, and slices; not at all for several sequences."""
        return _cut(chunk, self.splits if batch == 1 else 1, self.attend.rows)

    @staticmethod
    def for_batch(batch: int, capability: tuple[int, int] = (9, 0)) -> "Tiles":
        """The tiles for a batch of this size on a device of this compute capability."""
        if batch == 1:
            tiles = Tiles(fold=Tile(rows=16, depth=32, stages=2), fold_precision="tf32x3")
        elif batch <= 16:
            deep = Tile(rows=64, depth=256)
            tiles = Tiles(gate_many=deep, output_many=deep, head_many=deep)
        else:
            tiles = Tiles()
        if capability != (8, 0) and not 9 <= capability[0] < 12:  # under 100 KB of shared memory per program
            names = ("gate_many", "output_many", "head_many", "fold")
            tiles = replace(tiles, **{name: replace(getattr(tiles, name), stages=2) for name in names})
        return replace(tiles, overlap=capability >= (9, 0))

    @staticmethod
    def for_draft(capability: tuple[int, int] = (9, 0)) -> "Tiles":
        """The tiles for a draft, whose activations are float32: half as deep, about as many bytes in flight."""
        tiles = Tiles.for_batch(DRAFT, capability)
        deep = replace(tiles.gate_many, depth=128, stages=2 * tiles.gate_many.stages - 1)
        return replace(tiles, gate_many=deep, output_many=deep, head_many=deep)


def _cut(size: int, most: int, tile: int) -> tuple[int, int]:
    """A size cut into at most `most` equal parts of whole tiles: the size of a part, and the number of parts."""
    part = triton.cdiv(triton.cdiv(size, most), tile) * tile
    return part, triton.cdiv(size, part)


@dataclass(frozen=True, kw_only=True)
class Form:
    """What all layers of a model have in common."""

    width: int
    block: int
    """Tokens between two folds."""
    activation: str
    centred: bool
    """Whether norms subtract the mean."""
    epsilon: float
    head_scale: float
    """What the normed stream is multiplied by before the head."""


class Mixing(NamedTuple):
    """A state space whose outputs are begun beside a product: what earlier tokens add to this one's."""

    inputs: Tensor  # [W, B, H], of the block
    taps: Tensor  # [W, H]
    carried: Tensor  # [W, B, H]: what the block's starting state adds
    base: Tensor  # [B, H], written
    inner: Tensor  # [B, H], written: the product's last rows


class Stream:
    """The residual stream x [B, E], its counters, the logits [B, V], and scratch memory that layers use in turn.

    Activations between kernels are float32 for one row and bfloat16 for several.
    """

    draft = 0
    """The tokens of a block where the rows are a draft of one row (`Draft`), else 0."""

    def __init__(self, form: Form, batch: int, vocab_size: int, tiles: Tiles, device: torch.device) -> None:
        self.form, self.batch, self.tiles, self.device = form, batch, tiles, device
        self._between = torch.float32 if batch == 1 or self.draft else torch.bfloat16
        self._scratch: dict[tuple[Any, ...], Tensor] = {}
        self._pending: tuple[Tensor, int] | None = None  # a product's bias and its partial sums, still to be added
        self._counted = 1
        self.tokens = self.room(batch, dtype=torch.int64)
        self.counters = self.room(_MOST_COUNTERS, batch, dtype=torch.int64)  # the first row: positions
        self.read = self.room(1, dtype=torch.int32)  # the place in the block of the last token; −1: none
        self.joined = self.room(batch, dtype=torch.int32)  # where in the block each row came
        self.x, self.normed = self.room(batch, form.width), self.room(batch, form.width, dtype=self._between)
        self._partial = self.room(tiles.splits, batch, form.width)
        self.logits = self.room(batch, vocab_size)
        head_rows = tiles.head_one.rows_of(form.width) if batch == 1 else tiles.head_many.rows
        self._best = self.room(batch, triton.cdiv(vocab_size, head_rows))  # the largest of each tile of logits
        self._best_token = self.room(*self._best.shape, dtype=torch.int32)

    @property
    def position(self) -> Tensor:
        """Tokens that each row has read, [B]."""
        return self.counters[0]

    def room(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A new tensor of zeros."""
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def scratch(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory for what one kernel leaves to the next, shared by all layers that ask for the same."""
        key = (name, shape, dtype)
        if key not in self._scratch:
            self._scratch[key] = self.room(self.batch, *shape, dtype=dtype or self._between)
        return self._scratch[key]

    def counter(self) -> Tensor:
        """A number per row, [B], that every token raises by one before any layer sees it."""
        self._counted += 1
        return self.counters[self._counted - 1]

    def embed(self, tokens: Tensor, embedding: Tensor, wavenumber: Tensor | None, early: bool) -> None:
        """Begin the step of tokens [B]; `wavenumber` [E / 2] where positions are sinusoidal.

        `early`: what comes before it is one of these kernels, so that it may be launched before that has ended.
        """
        E = self.form.width
        decode.embed_rows[(self.batch,)](
            tokens, self.counters, self.read, embedding, self.counters if wavenumber is None else wavenumber,
            self.x, embedding.shape[0], E,
            COUNTERS=self._counted, SINUSOIDS=wavenumber is not None, E_PAD=pad(E), **self.launch(early=early),
        )  # fmt: skip

    def product(self, norm: Pair, dense: Pair, out: Tensor, activation: str, mixing: Mixing | None = None) -> None:
        """φ(W norm(x) + b); the weight's last rows are those of `mixing`."""
        form, tiles, (rows, E) = self.form, self.tiles, dense[0].shape
        channels = mixing.inner.shape[1] if mixing else 0
        if self.batch > 1:
            self.settle(norm, mixing)
            tile = tiles.gate_many
            columns = tile.columns_of(self.batch)
            decode_batch.gate_inner_many[(triton.cdiv(rows, tile.rows), triton.cdiv(self.batch, columns))](
                self.normed, *dense, out, mixing.inner if mixing else out,
                self.batch, E, rows - channels, channels, activation,
                ROWS=tile.rows, COLUMNS=columns, DEPTH=tile.depth, **self.launch(tile),
            )  # fmt: skip
            return
        tile, at_once = tiles.gate_one, tiles.gate_one.rows_of(E)
        begun = (mixing.inner, *mixing[:4]) if mixing else (out,) * 5
        decode.gate_inner_one[(triton.cdiv(rows, at_once) + triton.cdiv(channels, tiles.channels),)](
            self.x, *norm, *dense, out, *begun, self.read, form.epsilon,
            E, rows - channels, channels, form.centred, activation,
            E_PAD=pad(E), W_PAD=pad(form.block), ROWS=at_once, CHANNELS=tiles.channels, **self.launch(tile),
        )  # fmt: skip

    def add(self, given: Tensor, dense: Pair) -> None:
        """x += W given + b."""
        tiles, (E, F) = self.tiles, dense[0].shape
        if self.batch == 1:
            tile = tiles.output_one
            decode.output_one[(triton.cdiv(E, tile.rows),)](
                given, *dense, self.x, E, F,
                ROWS=tile.rows, COLUMNS=min(tile.depth, pad(F)), **self.launch(tile),
            )  # fmt: skip
            return
        tile = tiles.output_many
        columns = tile.columns_of(self.batch)
        part, slices = _cut(F, tiles.splits, tile.depth)  # fewer slices if it is narrow
        decode_batch.output_many[(triton.cdiv(E, tile.rows), slices, triton.cdiv(self.batch, columns))](
            given, dense[0], self._partial, self.batch, E, F,
            SLICE=part, ROWS=tile.rows, COLUMNS=columns, DEPTH=tile.depth, **self.launch(tile),
        )  # fmt: skip
        self._pending = dense[1], slices

    def head(self, norm: Pair, weight: Tensor) -> None:
        """The logits of the normed stream, and the largest of each tile with its token; the step is over."""
        form, (V, E), out = self.form, weight.shape, (self.logits, self._best, self._best_token)
        if self.batch == 1:
            tile = self.tiles.head_one
            rows = tile.rows_of(E)
            decode.head_one[(triton.cdiv(V, rows),)](
                self.x, *norm, weight, *out, form.epsilon, form.head_scale, V, E, form.centred,
                E_PAD=pad(E), ROWS=rows, **self.launch(tile),
            )  # fmt: skip
            return
        tile = self.tiles.head_many
        columns = tile.columns_of(self.batch)
        self.settle(norm, factor=form.head_scale)
        decode_batch.head_many[(triton.cdiv(V, tile.rows), triton.cdiv(self.batch, columns))](
            self.normed, weight, *out, self.batch, V, E, ROWS=tile.rows, COLUMNS=columns, DEPTH=tile.depth,
            **self.launch(tile),
        )  # fmt: skip

    def choose(self, out: Tensor) -> None:
        """The likeliest tokens, from the tiles' of `head`: the next step's `tokens`, and a copy in `out` [B]."""
        tiles = self._best.shape[1]
        decode.choose_next[(self.batch,)](
            self._best, self._best_token, self.tokens, out, tiles, TILES_PAD=pad(tiles), **self.launch()
        )

    def launch(self, tile: Tile | None = None, early: bool = True) -> dict[str, Any]:
        """Options of a launch."""
        options: dict[str, Any] = {"OVERLAP": self.tiles.overlap, "num_warps": tile.warps if tile else 4}
        if tile:
            options["num_stages"] = tile.stages
        return options | ({"launch_pdl": True} if self.tiles.overlap and early else {})

    def settle(self, norm: Pair, mixing: Mixing | None = None, factor: float = 1.0) -> None:
        """Several rows: add what is pending to the stream, which a mixer that reads `x` itself needs first, and norm it
        for what follows; beside it compute what earlier tokens add to `mixing`.
        """
        form, unused = self.form, self.x
        bias, slices = self._pending or (norm[1], 0)
        self._pending = None
        H = mixing.inner.shape[1] if mixing else 1
        begun = mixing[:4] if mixing else (unused,) * 4
        grid = self.batch + (triton.cdiv(self.batch * H, self.tiles.channels) if mixing else 0)
        decode_batch.add_and_norm[(grid,)](
            self.x, self._partial, bias, *norm, self.normed, *begun, self.read,
            form.epsilon, factor, self.batch, form.width, H, form.centred, SPLITS=slices,
            E_PAD=pad(form.width), W_PAD=pad(form.block), CHANNELS=self.tiles.channels, DRAFT=self.draft,
            **self.launch(),
        )  # fmt: skip


class Draft(Stream):
    """DRAFT successive tokens of a row that is alone on its stream, as the rows of this one, to read at once.

    They work on the state and the counters of their row. What is taken back lies beyond the cursors and is written
    over. All activations are float32, as for one row: what is drawn would differ too often otherwise. The tokens after
    the next are looked up in what the row has read, which is kept here.
    """

    def __init__(self, row: Stream, vocab_size: int, tiles: Tiles) -> None:
        assert row.batch == 1
        self.draft = row.form.block
        super().__init__(row.form, DRAFT, vocab_size, tiles, row.device)
        self._row, self.read = row, row.read
        self.given = self.room(DRAFT, dtype=torch.int64)  # the first is the row's own; −2: none
        self._history, self._length = self.room(2 * HISTORY, dtype=torch.int64), self.room(1, dtype=torch.int64)
        self._noted = 0  # how long it is, as far as the host knows
        self._ahead = torch.arange(DRAFT, device=row.device)

    def begin(self, embedding: Tensor, wavenumber: Tensor | None) -> None:
        """Begin with the row's next token, and drafted ones after it."""
        torch.add(self._row.counters, self._ahead, out=self.counters)
        self.look_up()
        self.embed(self.given, embedding, wavenumber, early=False)

    def look_up(self) -> None:
        """Find the tokens to be `given`."""
        decode.find_draft[(1,)](
            self._row.tokens, self._history, self._length, self.given, DRAFT, B_PAD=pad(DRAFT), SPAN=2048,
            **self.launch(early=False) | {"num_warps": 8},
        )  # fmt: skip

    def remember(self, tokens: Tensor) -> None:
        """Begin the history anew."""
        self._noted = 0
        self.note(tokens[-HISTORY:])

    def note(self, tokens: Tensor) -> None:
        """Add tokens that were read without a draft."""
        self._history[self._noted : self._noted + len(tokens)] = tokens
        self.count(len(tokens))
        self._length.fill_(self._noted)

    def count(self, tokens: int) -> None:
        """Learn that the history has so many tokens more; where it is full, its beginning is forgotten."""
        self._noted += tokens
        if self._noted > len(self._history) - _MOST_NEW:
            self._history[:HISTORY] = self._history[self._noted - HISTORY : self._noted].clone()
            self._noted = HISTORY
            self._length.fill_(HISTORY)

    def accept(self, drawn: Tensor) -> None:
        """Move the row on by the tokens that were drawn as they were drafted; −2 in place of what was drawn beyond."""
        row = self._row
        decode.accept_draft[(1,)](
            self.given, drawn, row.tokens, row.counters, row.read, self._history, self._length,
            DRAFT, self.draft, self._counted, B_PAD=pad(DRAFT), COUNTERS_PAD=pad(self._counted),
            **self.launch(early=False) | {"num_warps": 1},
        )  # fmt: skip


def pad(size: int, least: int = 1) -> int:
    """The next power of two; at least 16 for a matrix product over it."""
    return max(least, triton.next_power_of_2(size))
