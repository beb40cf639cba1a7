"""Where a block lives: weighted rendezvous hashing of block keys over the regions of a pod map.

Every agent computes it alone and all compute the same, so the specification is exact to the bit: 64-bit integer
mixing, then a logarithm made only of IEEE additions, multiplications and divisions (a library's `log` may differ
in its last bit between machines). Held by tests/golden/placement. Pure computation: no I/O, no state but the map.

For key (lo, hi) and region r with uuid u and weight w > 0, all integers modulo 2**64:
    seed = little-endian u64 of BLAKE2b(u, digest_size=8, person="entresol-place1")
    h    = mix(lo ^ (hi * 0x9E3779B97F4A7C15) ^ seed), mix being the finaliser of SplitMix64
    x    = (h >> 12) + 0.5, so that x / 2**52 lies strictly between 0 and 1
The region with the lowest score -ln(x / 2**52) / w has the block, or simply that with the largest x where all weights
are equal; the lowest uuid decides a tie. A region's share is its share of the weights, and when a region comes or goes
only the blocks that it gains or had move.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from common.errors import UserError

UUID_BYTES: Final = 16
_PERSON = b"entresol-place1"
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_12, _SHIFT_27, _SHIFT_30, _SHIFT_31, _SHIFT_52 = (np.uint64(n) for n in (12, 27, 30, 31, 52))
_SQRT_HALF_BITS = np.uint64(0x3FE6A09E667F3BCD)
_U64 = (1 << 64) - 1
_SQRT_HALF = 0.7071067811865476
_LN_2 = 0.6931471805599453
_ATANH_TERMS = (0.3333333333333333, 0.2, 0.14285714285714285, 0.1111111111111111)
"""ln(m) = 2 (s + s**3/3 + s**5/5 ...) with s = (m - 1)/(m + 1); up to s**9 it errs by less than 1e-9 for m between
sqrt(1/2) and sqrt(2)."""


@dataclass(frozen=True)
class PlacedRegion:
    """One region in the map. `weight` is its capacity, in a unit that all regions share; 0 takes no blocks."""

    uuid: bytes
    weight: float


@dataclass(frozen=True)
class PodMap:
    """The regions of a pod at one `epoch`; a map with a higher epoch replaces one with a lower.

    Raises UserError: a uuid that is not 16 bytes or is there twice, a weight out of bounds, no region with weight.
    """

    epoch: int
    regions: tuple[PlacedRegion, ...]
    _order: npt.NDArray[np.intp] = field(init=False, repr=False, compare=False)
    _seeds: npt.NDArray[np.uint64] = field(init=False, repr=False, compare=False)
    _weights: npt.NDArray[np.float64] | None = field(init=False, repr=False, compare=False)
    _scalars: tuple[tuple[int, int, float], ...] = field(init=False, repr=False, compare=False)
    """(seed, index, weight) in order of uuid, for one key at a time."""
    table: bytes = field(init=False, repr=False, compare=False)
    """The same for native code: u64 count of the regions that take blocks, u64 whether their weights are equal; for
    each, in order of uuid, u64 seed, u64 index, f64 weight."""

    def __post_init__(self) -> None:
        uuids = [region.uuid for region in self.regions]
        if any(len(uuid) != UUID_BYTES for uuid in uuids) or len(set(uuids)) != len(uuids):
            raise UserError(f"pod map: every region needs its own uuid of {UUID_BYTES} bytes")
        if any(not (math.isfinite(region.weight) and region.weight >= 0) for region in self.regions):
            raise UserError("pod map: a region's weight is a finite number of at least 0")
        order = sorted((i for i, region in enumerate(self.regions) if region.weight), key=lambda i: uuids[i])
        if not order:
            raise UserError("pod map: no region with a weight, so there is nowhere to put a block")
        weights = [self.regions[i].weight for i in order]
        column = np.array([float(weight) for weight in weights]).reshape(-1, 1)
        object.__setattr__(self, "_order", np.array(order, np.intp))
        object.__setattr__(self, "_seeds", np.array([_seed(uuids[i]) for i in order], np.uint64).reshape(-1, 1))
        object.__setattr__(self, "_weights", None if len(set(weights)) == 1 else column)
        scalars = tuple((_seed(uuids[i]), i, float(self.regions[i].weight)) for i in order)
        object.__setattr__(self, "_scalars", scalars)
        table = struct.pack("<QQ", len(scalars), len(set(weights)) == 1)
        object.__setattr__(self, "table", table + b"".join(struct.pack("<QQd", *scalar) for scalar in scalars))

    def place(self, key_lo: npt.NDArray[np.uint64], key_hi: npt.NDArray[np.uint64]) -> npt.NDArray[np.intp]:
        """For each key the index of its region in `regions`."""
        if len(self._order) == 1:
            return np.full(len(key_lo), self._order[0], np.intp)
        tops = _mix(self._seeds ^ (key_lo ^ (key_hi * _GOLDEN))) >> _SHIFT_12
        if self._weights is None:
            rows = tops.argmax(axis=0)
        else:
            scores = _negative_log(tops)
            scores /= self._weights
            rows = scores.argmin(axis=0)
        regions: npt.NDArray[np.intp] = self._order[rows]
        return regions

    def place_one(self, key_lo: int, key_hi: int) -> int:
        """As `place`, for one key: plain integers beat numpy's fixed cost there."""
        folded = key_lo ^ (key_hi * 0x9E3779B97F4A7C15 & _U64)
        best_index, best_score = -1, -1.0
        equal = self._weights is None
        for seed, index, weight in self._scalars:
            h = folded ^ seed
            h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9 & _U64
            h = (h ^ (h >> 27)) * 0x94D049BB133111EB & _U64
            top = (h ^ (h >> 31)) >> 12
            score = float(top) if equal else -(_negative_log_one(top) / weight)
            if best_index < 0 or score > best_score:
                best_index, best_score = index, score
        return best_index


def _seed(uuid: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(uuid, digest_size=8, person=_PERSON).digest(), "little")


def _mix(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64, in place."""
    shifted = hashes >> _SHIFT_30
    hashes ^= shifted
    hashes *= _MIX_1
    np.right_shift(hashes, _SHIFT_27, out=shifted)
    hashes ^= shifted
    hashes *= _MIX_2
    np.right_shift(hashes, _SHIFT_31, out=shifted)
    hashes ^= shifted
    return hashes


def _negative_log(tops: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """-ln((top + 0.5) / 2**52), the same to the bit on every IEEE machine. Each `top` is below 2**52."""
    x = tops.astype(np.float64)
    x += 0.5
    bits = x.view(np.uint64)
    exponent = (bits - _SQRT_HALF_BITS).view(np.int64) >> np.int64(52)
    mantissa = (bits - (exponent.view(np.uint64) << _SHIFT_52)).view(np.float64)
    s: npt.NDArray[np.float64] = mantissa - 1.0
    mantissa += 1.0
    s /= mantissa
    square = s * s
    series: npt.NDArray[np.float64] = square * _ATANH_TERMS[3]
    for term in (_ATANH_TERMS[2], _ATANH_TERMS[1], _ATANH_TERMS[0]):
        series += term
        series *= square
    series += 1.0
    series *= s
    series *= -2.0
    scaled: npt.NDArray[np.float64] = np.subtract(52.0, exponent)
    scaled *= _LN_2
    series += scaled
    return series


def _negative_log_one(top: int) -> float:
    """As `_negative_log`, operation by operation."""
    mantissa, exponent = math.frexp(top + 0.5)
    if mantissa < _SQRT_HALF:
        mantissa *= 2.0
        exponent -= 1
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = square * _ATANH_TERMS[3]
    for term in (_ATANH_TERMS[2], _ATANH_TERMS[1], _ATANH_TERMS[0]):
        series = (series + term) * square
    return (series + 1.0) * s * -2.0 + (52.0 - exponent) * _LN_2
