"""Pins end when they should, and no step takes longer the more of them there are."""

from __future__ import annotations

import random

import pytest

from dpu_app.regions.pins import EXPIRE_MAX, NS_PER_S, Pins
from tests.unit.dpu_app.work import instructions

NOW_NS = 5 * NS_PER_S + 300_000_000


def test_a_pin_holds_until_its_time_and_is_forgotten_within_a_second_of_it() -> None:
    pins = Pins(10, NOW_NS)
    assert pins.pin(7, NOW_NS, 2)
    until = NOW_NS + 2 * NS_PER_S
    for now_ns, holds, known in ((until - 1, True, True), (until, False, True), (until + NS_PER_S, False, False)):
        pins.expire(now_ns)
        assert (pins.holds(7, now_ns), 7 in pins) == (holds, known)
    assert not pins.holds(8, NOW_NS)


def test_a_pin_is_made_longer_but_never_shorter() -> None:
    pins = Pins(10, NOW_NS)
    pins.pin(7, NOW_NS, 2)
    pins.pin(7, NOW_NS, 9)
    pins.pin(7, NOW_NS, 4)
    pins.expire(NOW_NS + 8 * NS_PER_S)
    assert pins.holds(7, NOW_NS + 8 * NS_PER_S)
    assert len(pins) == 1
    pins.expire(NOW_NS + 10 * NS_PER_S)
    assert len(pins) == 0


def test_no_more_than_allowed_but_one_that_has_ended_makes_room() -> None:
    pins = Pins(2, NOW_NS)
    assert pins.pin(1, NOW_NS, 1)
    assert pins.pin(2, NOW_NS, 9)
    assert not pins.pin(3, NOW_NS, 9)
    assert pins.pin(2, NOW_NS, 10)
    assert pins.pin(3, NOW_NS + 2 * NS_PER_S, 9)
    assert (1 in pins, 2 in pins, 3 in pins) == (False, True, True)


@pytest.mark.parametrize("seed", range(5))
def test_like_a_plain_dictionary(seed: int) -> None:
    numbers = random.Random(seed)
    pins, model, now_ns = Pins(60, NOW_NS), dict[int, int](), NOW_NS
    for _ in range(3000):
        slot = numbers.randrange(100)
        now_ns += numbers.randrange(NS_PER_S // 10)
        step = numbers.random()
        if step < 0.6:
            ttl_s = numbers.choice([1, 2, 5, 30])
            if pins.pin(slot, now_ns, ttl_s):
                model[slot] = max(model.get(slot, 0), now_ns + ttl_s * NS_PER_S)
        elif step < 0.8:
            pins.unpin(slot)
            model.pop(slot, None)
        else:
            pins.expire(now_ns)
        assert {slot for slot in range(100) if pins.holds(slot, now_ns)} == {
            slot for slot, until in model.items() if until > now_ns
        }
        assert len(pins) <= 60
    pins.expire(now_ns + 100 * NS_PER_S)
    assert len(pins) == 0


def test_no_step_takes_longer_the_more_pins_there_are() -> None:
    work = []
    for count in (2_000, 50_000):
        pins = Pins(count, NOW_NS)
        for slot in range(count):
            pins.pin(slot, NOW_NS, 100 + slot % 2)
        steps = (
            lambda pins=pins: pins.expire(NOW_NS + NS_PER_S),
            lambda pins=pins, count=count: pins.pin(count + 1, NOW_NS + NS_PER_S, 5),
            lambda pins=pins: pins.unpin(3),
            lambda pins=pins: pins.expire(NOW_NS + 102 * NS_PER_S),
        )
        work.append([instructions(step) for step in steps])
        assert len(pins) == count - 1 - EXPIRE_MAX
    assert work[1] == work[0]


def test_pins_that_end_together_are_dropped_a_part_at_a_time() -> None:
    pins = Pins(10_000, NOW_NS)
    for slot in range(2 * EXPIRE_MAX + 1):
        pins.pin(slot, NOW_NS, 1)
    left = []
    while len(pins):
        pins.expire(NOW_NS + 10 * NS_PER_S)
        left.append(len(pins))
    assert left == [EXPIRE_MAX + 1, 1, 0]
