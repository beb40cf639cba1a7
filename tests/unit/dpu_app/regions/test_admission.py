"""Admission filters: who is let in, when it is forgotten, and what a name may be."""

from __future__ import annotations

import random

import pytest

from common.errors import UserError
from dpu_app.regions.admission import AdmitAll, SecondRequest, create


def test_everything_is_admitted_by_default() -> None:
    assert create("all").admit(1, 0)
    assert isinstance(create("all"), AdmitAll)


def test_the_second_request_is_admitted() -> None:
    admission = SecondRequest(keys=1000, window_s=100)
    assert not admission.admit(7, 0)
    assert admission.admit(7, 40)
    assert admission.admit(7, 41)
    assert not admission.admit(8, 41)


def test_what_was_asked_long_ago_is_forgotten() -> None:
    admission = SecondRequest(keys=1000, window_s=100)
    admission.admit(7, 0)
    assert not admission.admit(7, 101)
    admission.admit(9, 120)
    assert admission.admit(9, 160)


def test_a_clock_that_jumps_forgets_no_more_than_it_must() -> None:
    admission = SecondRequest(keys=1000, window_s=100)
    admission.admit(7, 1000)
    assert admission.admit(7, 900)


def test_many_other_keys_push_out_an_old_one() -> None:
    numbers = random.Random(1)
    admission = SecondRequest(keys=1000, window_s=10_000)
    admission.admit(7, 0)
    for _ in range(400):
        admission.admit(numbers.getrandbits(64), 1)
    assert admission.admit(7, 2)
    for _ in range(2000):
        admission.admit(numbers.getrandbits(64), 3)
    assert not admission.admit(7, 4)


def test_few_strangers_are_taken_for_known() -> None:
    numbers = random.Random(2)
    admission = SecondRequest(keys=10_000, window_s=10_000)
    admitted = sum(admission.admit(numbers.getrandbits(64), 0) for _ in range(20_000))
    assert admitted < 200
    assert admission.memory_bytes < 10_000 * 3


def test_names_and_bounds() -> None:
    assert isinstance(create("second_request", keys=100, window_s=60), SecondRequest)
    with pytest.raises(UserError, match="all or second_request"):
        create("lfu")
    with pytest.raises(UserError, match="2 or more"):
        create("second_request", keys=1)
