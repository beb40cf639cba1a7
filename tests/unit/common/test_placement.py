"""Rendezvous placement: exact, in proportion to the weights, and moving no more than it must."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from common.errors import UserError
from common.placement import PlacedRegion, PodMap, _negative_log, _negative_log_one

GOLDEN = Path(__file__).parents[2] / "golden" / "placement" / "vectors.json"
MASK = (1 << 64) - 1


def _uuid(n: int) -> bytes:
    return hashlib.blake2b(b"region %d" % n, digest_size=16).digest()


def _keys(count: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    pairs = np.frombuffer(b"".join(hashlib.blake2b(b"%d" % n, digest_size=16).digest() for n in range(count)), "<u8")
    return pairs[0::2].copy(), pairs[1::2].copy()


def _by_the_book(lo: int, hi: int, regions: list[PlacedRegion]) -> int:
    """The specification written out key by key, with the library's logarithm."""
    equal = len({region.weight for region in regions}) == 1
    best: tuple[float, bytes, int] | None = None
    for index, region in enumerate(regions):
        digest = hashlib.blake2b(region.uuid, digest_size=8, person=b"entresol-place1").digest()
        h = lo ^ (hi * 0x9E3779B97F4A7C15 & MASK) ^ int.from_bytes(digest, "little")
        h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        h = (h ^ (h >> 27)) * 0x94D049BB133111EB & MASK
        h ^= h >> 31
        x = ((h >> 12) + 0.5) / 2**52
        score = (-x if equal else -math.log(x) / region.weight, region.uuid, index)
        best = score if best is None else min(best, score)
    if best is None:
        raise ValueError("no regions")
    return best[2]


def test_golden_vectors() -> None:
    for vector in json.loads(GOLDEN.read_text()):
        regions = tuple(PlacedRegion(bytes.fromhex(uuid), weight) for uuid, weight in vector["regions"])
        lo, hi = _keys(len(vector["placed"]))
        assert PodMap(1, regions).place(lo, hi).tolist() == vector["placed"]
        assert [PodMap(1, regions).place_one(int(a), int(b)) for a, b in zip(lo, hi)] == vector["placed"]


@pytest.mark.parametrize("weights", [[1, 1, 1, 1], [1, 2, 3, 4, 4, 7.5, 100]])
def test_agrees_with_the_specification(weights: list[float]) -> None:
    regions = [PlacedRegion(_uuid(n), weight) for n, weight in enumerate(weights)]
    lo, hi = _keys(3000)
    expected = [_by_the_book(int(a), int(b), regions) for a, b in zip(lo, hi)]
    pod_map = PodMap(1, tuple(regions))
    assert pod_map.place(lo, hi).tolist() == expected
    assert [pod_map.place_one(int(a), int(b)) for a, b in zip(lo, hi)] == expected


def test_one_key_at_a_time_agrees_to_the_bit() -> None:
    tops = np.random.default_rng(5).integers(0, 1 << 52, 20000, dtype=np.uint64)
    tops[:4] = [0, 1, (1 << 52) - 1, 1 << 51]
    assert _negative_log(tops).tolist() == [_negative_log_one(int(top)) for top in tops]


@pytest.mark.parametrize("weights", [[1, 1, 1], [1, 2, 3, 4], [5, 0, 5]])
def test_shares_follow_the_weights(weights: list[float]) -> None:
    regions = tuple(PlacedRegion(_uuid(n), weight) for n, weight in enumerate(weights))
    lo, hi = _keys(20000)
    shares = np.bincount(PodMap(1, regions).place(lo, hi), minlength=len(weights)) / len(lo)
    assert shares == pytest.approx(np.array(weights) / sum(weights), abs=0.015)


@pytest.mark.parametrize("weights", [[3, 3, 3, 3], [1, 2, 3, 4]])
def test_only_what_must_move_moves(weights: list[float]) -> None:
    regions = [PlacedRegion(_uuid(n), weight) for n, weight in enumerate(weights)]
    lo, hi = _keys(5000)
    before = PodMap(1, tuple(regions)).place(lo, hi)
    without_last = PodMap(2, tuple(regions[:-1])).place(lo, hi)
    stays = before != len(regions) - 1
    assert (before[stays] == without_last[stays]).all()
    grown = PodMap(3, (*regions[:-1], PlacedRegion(regions[-1].uuid, weights[-1] * 2))).place(lo, hi)
    assert set(grown[grown != before].tolist()) == {len(regions) - 1}


def test_order_of_listing_does_not_matter() -> None:
    regions = [PlacedRegion(_uuid(n), n + 1) for n in range(5)]
    lo, hi = _keys(500)
    uuids = [regions[i].uuid for i in PodMap(1, tuple(regions)).place(lo, hi)]
    turned = regions[::-1]
    assert [turned[i].uuid for i in PodMap(1, tuple(turned)).place(lo, hi)] == uuids


def test_one_region_and_no_keys() -> None:
    lo, hi = _keys(3)
    assert PodMap(1, (PlacedRegion(_uuid(1), 1),)).place(lo, hi).tolist() == [0, 0, 0]
    two = PodMap(1, (PlacedRegion(_uuid(1), 1), PlacedRegion(_uuid(2), 2)))
    assert two.place(lo[:0], hi[:0]).tolist() == []


@pytest.mark.parametrize(
    "regions",
    [
        (),
        (PlacedRegion(b"short", 1),),
        (PlacedRegion(_uuid(1), 1), PlacedRegion(_uuid(1), 1)),
        (PlacedRegion(_uuid(1), 0),),
        (PlacedRegion(_uuid(1), -1),),
        (PlacedRegion(_uuid(1), math.nan),),
        (PlacedRegion(_uuid(1), math.inf),),
    ],
)
def test_bad_maps_are_refused(regions: tuple[PlacedRegion, ...]) -> None:
    with pytest.raises(UserError, match="pod map"):
        PodMap(1, regions)
