"""Drawing the next token of every row in one kernel: the fast path of `gss.decode.sampler`.

A program handles one row and holds its weights, up to 32,768, in registers. It finds the most likely tokens without
sorting, by bisecting the bits of the smallest weight to keep until no other weight lies between the bounds. Tokens that
tie for the last place are all kept.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def draw(
    logits: Tensor, numbers: Tensor, seed: Tensor, seen: Tensor, position: Tensor, tokens: Tensor, penalised: bool
) -> None:
    """Write the next tokens [B] for logits [B, V]; the rest as `gss.decode.sampler.Sampler` holds it."""
    rows, size = logits.shape
    padded = max(16, triton.next_power_of_2(size))
    draw_rows[(rows,)](
        logits, numbers, seed, seen.view(torch.uint8), position, tokens, size, numbers.shape[1],
        PENALISED=penalised, SIZE=padded, num_warps=max(1, min(32, padded // 512)),
    )  # fmt: skip


@triton.jit
def draw_rows(
    logits_at, numbers_at, seed_at, seen_at, position_at, tokens_at, V, rows,
    PENALISED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Logits [B, V], settings [5, rows], seeds, marks [B, V], positions → tokens [B]; −1: logits are not finite."""
    row = tl.program_id(0)
    temperature = tl.load(numbers_at + row).to(tl.float32)
    top_k = tl.load(numbers_at + rows + row).to(tl.int32)
    top_p = tl.load(numbers_at + 2 * rows + row).to(tl.float32)
    min_p = tl.load(numbers_at + 3 * rows + row).to(tl.float32)
    token = tl.arange(0, SIZE)
    inside = token < V
    logits = tl.load(logits_at + row.to(tl.int64) * V + token, mask=inside, other=float("-inf"))
    if PENALISED:
        penalty = tl.load(numbers_at + 4 * rows + row).to(tl.float32)
        seen = tl.load(seen_at + row.to(tl.int64) * V + token, mask=inside, other=0)
        logits = tl.where(seen != 0, tl.where(logits > 0, logits / penalty, logits * penalty), logits)
    logits = tl.where(logits == logits, logits, float("inf"))  # NaN shows in the largest
    peak, chosen = tl.max(logits, 0, return_indices=True)
    if temperature > 0:
        weight = tl.where(inside, tl.exp((logits - peak) / tl.maximum(temperature, 1e-30)), 0.0)
        weight = tl.where(weight >= min_p, weight, 0.0)
        if top_k < V:
            least = cut(weight, top_k.to(tl.float32), 0.0, 0)
            weight = tl.where(weight.to(tl.int32, bitcast=True) >= least, weight, 0.0)
        if top_p < 1:
            total = tl.sum(weight, 0)
            least = cut(weight, top_p * total, total, 1)
            weight = tl.where(weight.to(tl.int32, bitcast=True) >= least, weight, 0.0)
        reached = tl.cumsum(weight, 0)
        noise = mixed(mixed(tl.load(seed_at + row) + -0x61C8864680B583EB) + tl.load(position_at + row))
        share = ((noise >> 12) & 0xFFFFFFFFFFFFF).to(tl.float64) * 2.220446049250313e-16
        target = (share * tl.sum(weight, 0).to(tl.float64)).to(tl.float32)
        # Rounding may leave the target at the very end: the last token that has weight is then meant.
        last = tl.max(tl.where(weight > 0, token, 0), 0)
        chosen = tl.minimum(tl.sum((reached <= target).to(tl.int32), 0), last)
    chosen = tl.where(tl.abs(peak) < float("inf"), chosen, -1)
    tl.store(tokens_at + row, chosen.to(tl.int64))
    if PENALISED:
        tl.store(seen_at + row.to(tl.int64) * V + tl.maximum(chosen, 0), 1)


@triton.jit
def cut(weight, bound, total, MASS: tl.constexpr):
    """The least bits t for which the weights above t number under `bound` or, if MASS, sum to under it, of `total`.

    Lower bits are as good where no weight lies between: it ends when what lies there is one weight and no more.
    """
    bits = weight.to(tl.int32, bitcast=True)
    size: tl.constexpr = weight.shape[0]
    low = tl.full((), 0, tl.int32)
    high = tl.full((), 0x3F800000, tl.int32)  # weights are at most 1, and none is above that
    above_low = tl.full((), size, tl.float32)  # the number or the sum of weights from `low` on, or more
    above_high = tl.full((), 0.0, tl.float32)
    least = tl.full((), 1.0, tl.float32)  # what each weight between counts for, or less
    if MASS:  # smaller weights than that do not sum to what may be left out, however many there are
        least = tl.maximum(0.5 * (total - bound) / size, 0.0)
        low = least.to(tl.int32, bitcast=True)
        above_low = total
    while (low < high) & (above_low - above_high > 1.5 * least):
        middle = (low + high) // 2
        if MASS:
            above = tl.sum(tl.where(bits > middle, weight, 0.0), 0)
        else:
            above = tl.sum((bits > middle).to(tl.float32), 0)
        few = above < bound
        above_high = tl.where(few, above, above_high)
        above_low = tl.where(few, above_low, above)
        low = tl.where(few, low, middle + 1)
        high = tl.where(few, middle, high)
        if MASS:
            least = low.to(tl.float32, bitcast=True)
    return low


@triton.jit
def mixed(x):
    """SplitMix64's hash of int64."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
