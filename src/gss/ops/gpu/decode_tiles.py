"""How the decoding kernels are cut up into programs: the fastest tiles found for the 192M preset on an H200."""

from dataclasses import dataclass, replace
from typing import Any

import triton


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
        """The sequences per program, of so many in all."""
        return max(16, min(self.columns, triton.next_power_of_2(batch)))


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """The tiles of every kernel; `for_batch` knows which are fast for a batch."""

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

    def with_(self, **changes: Any) -> "Tiles":
        """The same with some tiles replaced."""
        return replace(self, **changes)

    def slices(self, width: int) -> tuple[int, int]:
        """How a batch's sum over a width is cut, in whole tiles: columns per slice, and slices, few if it is narrow."""
        return _cut(width, self.splits, self.output_many.depth)

    def attention_slices(self, chunk: int, batch: int) -> tuple[int, int]:
        """How a chunk's keys are cut: keys per slice, and slices; not at all for several sequences."""
        return _cut(chunk, self.splits if batch == 1 else 1, self.attend.rows)

    @staticmethod
    def for_batch(batch: int, capability: tuple[int, int] = (9, 0)) -> "Tiles":
        """The tiles for so many sequences on a device of this compute capability."""
        if batch == 1:
            tiles = Tiles(fold=Tile(rows=16, depth=32, stages=2), fold_precision="tf32x3")
        elif batch <= 16:
            deep = Tile(rows=64, depth=256)
            tiles = Tiles(gate_many=deep, output_many=deep, head_many=deep)
        else:
            tiles = Tiles()
        if capability != (8, 0) and not 9 <= capability[0] < 12:  # under 100 KB of shared memory per program
            names = ("gate_many", "output_many", "head_many", "fold")
            tiles = tiles.with_(**{name: replace(getattr(tiles, name), stages=2) for name in names})
        return tiles.with_(overlap=capability >= (9, 0))


def _cut(size: int, most: int, tile: int) -> tuple[int, int]:
    """A size in at most so many equal parts of whole tiles: the size of a part, and how many there are."""
    part = triton.cdiv(triton.cdiv(size, most), tile) * tile
    return part, triton.cdiv(size, part)
