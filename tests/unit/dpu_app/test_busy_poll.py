"""Busy polling pays or ends: bounded after each request, given up where it is in vain, tried again now and then."""

from __future__ import annotations

import os

import pytest

from dpu_app import busy_poll
from dpu_app.busy_poll import BusyPoll, limit_of

LIMIT_NS = 100


def test_it_looks_for_the_next_request_for_a_bounded_time() -> None:
    poll = BusyPoll(LIMIT_NS)
    assert not poll.goes_on(0)
    poll.served(1000)
    assert poll.goes_on(1000)
    assert poll.goes_on(1099)
    assert not poll.goes_on(1100)
    assert not poll.goes_on(1050), "a wait that has ended does not begin again by itself"


def test_a_limit_of_zero_switches_it_off() -> None:
    poll = BusyPoll(0)
    poll.served(1000)
    assert not poll.goes_on(1000)


def _in_vain(poll: BusyPoll, now_ns: int) -> bool:
    """A request after which nothing comes: whether it was waited for."""
    poll.served(now_ns)
    waited = poll.goes_on(now_ns)
    while poll.goes_on(now_ns):
        now_ns += LIMIT_NS
    return waited


def test_where_it_is_in_vain_it_is_given_up_and_tried_again_now_and_then() -> None:
    poll = BusyPoll(LIMIT_NS)
    waits = [_in_vain(poll, 1000 * i) for i in range(3000)]
    assert waits[:4] == [True] * 4
    assert 4 < sum(waits) < 30
    assert any(waits[-2 * busy_poll._PASSED_MAX :])


def test_once_it_pays_it_goes_on() -> None:
    poll = BusyPoll(LIMIT_NS)
    now_ns = 0
    while _in_vain(poll, now_ns):
        now_ns += 1000
    while not poll.goes_on(now_ns):
        now_ns += 1000
        poll.served(now_ns)
    for _ in range(20):  # each request comes within the wait of the one before
        now_ns += LIMIT_NS // 2
        assert poll.goes_on(now_ns)
        poll.served(now_ns)
    now_ns += 1000
    assert not poll.goes_on(now_ns)
    poll.served(now_ns)
    assert poll.goes_on(now_ns), "one wait in vain among many that paid changes nothing"


def test_on_one_core_nobody_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {3})
    assert limit_of(LIMIT_NS) == 0
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {3, 4})
    assert limit_of(LIMIT_NS) == LIMIT_NS
