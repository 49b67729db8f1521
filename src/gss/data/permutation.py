"""A shuffle that can be asked for any place of its order: place -> item, with nothing stored.

A Feistel network over the next power of four, walked until it lands inside the range. It is our own arithmetic on
64-bit integers, so that the order never changes with a library's version.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble 64-bit numbers (the finaliser of splitmix64, arithmetic modulo 2^64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def derive_key(*parts: int) -> int:
    """A 64-bit key from a few integers, such as a seed and an epoch."""
    state = 0
    for part in parts:
        # The same mixing as above on one Python integer, which is quicker than an array of one.
        state = (state + part * _GOLDEN + _GOLDEN) % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state


def permute(places: Sequence[int] | npt.NDArray[np.integer], count: int, key: int) -> npt.NDArray[np.int64]:
    """The items at these places of a shuffle of range(count)."""
    values = np.asarray(places, dtype=np.uint64)
    if values.size and int(values.max()) >= count:
        raise ValueError(f"place {int(values.max())} is outside a shuffle of {count}")
    half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    keys = [np.uint64(derive_key(key, number)) for number in range(_ROUNDS)]
    result = _feistel(values, half, keys)
    outside = np.flatnonzero(result >= count)
    while outside.size:  # follow the cycle until it comes back inside: at most a few steps, as the range is >= 1/4
        result[outside] = _feistel(result[outside], half, keys)
        outside = outside[result[outside] >= count]
    return result.astype(np.int64)


def _feistel(values: npt.NDArray[np.uint64], half: int, keys: list[np.uint64]) -> npt.NDArray[np.uint64]:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right
