"""Busy polling pays or ends: bounded after each request, given up where it is in vain, tried again now and then."""

from __future__ import annotations

import os

import pytest

from dpu_app import busy_poll
from dpu_app.busy_poll import BusyPoll, limit_of

LIMIT_NS = 100


def test_it_looks_for_the_next_request_for_a_bounded_time_from_when_this_one_is_served() -> None:
    poll = BusyPoll(LIMIT_NS)
    assert not poll.goes_on(0)
    poll.served()
    assert poll.goes_on(5000)
    assert poll.goes_on(5099)
    assert not poll.goes_on(5100)
    assert not poll.goes_on(5050), "a wait that has ended does not begin again by itself"


def test_a_limit_of_zero_switches_it_off() -> None:
    poll = BusyPoll(0)
    poll.served()
    assert not poll.goes_on(1000)


def _in_vain(poll: BusyPoll) -> bool:
    """A request after which nothing comes: whether it was waited for."""
    poll.served()
    waited = poll.goes_on(1000)
    while poll.goes_on(1000 + LIMIT_NS):
        pass
    return waited


def _pays(poll: BusyPoll) -> None:
    """A request that comes while it is waited for."""
    poll.served()
    assert poll.goes_on(1000)
    poll.served()


def test_where_it_is_in_vain_it_is_given_up_and_tried_again_now_and_then() -> None:
    poll = BusyPoll(LIMIT_NS)
    waits = [_in_vain(poll) for _ in range(3000)]
    assert waits[0]
    assert 3 < sum(waits) < 30
    assert any(waits[-2 * busy_poll._PASSED_MAX :])


def test_where_half_of_it_is_in_vain_it_is_given_up_too() -> None:
    poll = BusyPoll(LIMIT_NS)
    waits = 0
    for number in range(2000):
        poll.served()
        if poll.goes_on(1000):
            waits += 1
            if number % 2:
                poll.goes_on(1000 + LIMIT_NS)
    assert waits < 200


def test_once_it_pays_it_goes_on_in_spite_of_a_wait_in_vain() -> None:
    poll = BusyPoll(LIMIT_NS)
    for _ in range(3000):
        _in_vain(poll)
    poll.served()
    while not poll.goes_on(1000):
        poll.served()
    for _ in range(20):
        _pays(poll)
    assert not poll.goes_on(1000) or not poll.goes_on(1000 + LIMIT_NS)
    for _ in range(3):
        assert _in_vain(poll)


def test_on_one_core_nobody_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {3})
    assert limit_of(LIMIT_NS) == 0
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {3, 4})
    assert limit_of(LIMIT_NS) == LIMIT_NS
