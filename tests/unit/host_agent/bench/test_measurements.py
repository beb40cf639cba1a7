"""Ratios are taken within a round, and medians of them after."""

from __future__ import annotations

import pytest

from host_agent.bench.measurements import Cell, Sample, percentiles, spread


def _sample(seconds: float, limit: float) -> Sample:
    return Sample([seconds], work=1.0, cpu_s={"agent": seconds / 2}, limits={"memmove": limit})


def test_a_slow_round_does_not_change_the_ratio() -> None:
    """The machine is ten times slower in the third round, limit and operation alike."""
    cell = Cell("pod", "retrieve_staged", 4096, 1, samples=[_sample(0.5, 4.0), _sample(0.5, 4.0), _sample(5, 0.4)])
    made = cell.as_dict()
    assert made["of"]["memmove"]["rounds"] == pytest.approx([0.5, 0.5, 0.5])
    assert (made["rate"]["min"], made["rate"]["median"], made["rate"]["max"]) == pytest.approx((0.2, 2.0, 2.0))
    assert made["cpu_s_per_unit"]["agent"]["median"] == pytest.approx(0.25)
    assert made["latency_us"]["calls"] == 3


def test_round_trips_are_counted_in_pings() -> None:
    assert Sample([3e-5, 4e-5, 9e-5], limits={"ping": 1e-5}).of_limit("ping") == pytest.approx(4)


def test_passes_of_one_round_add_up() -> None:
    sample = Sample()
    for part in (Sample([1.0], 2.0, {"dpu": 1.0}, notes=["a"]), Sample([1.0], 4.0, {"dpu": 2.0}, notes=["a", "b"])):
        part.other_answers["BUSY"] += 1
        sample.add(part)
    assert (sample.rate, sample.cpu_s, sample.notes) == (3.0, {"dpu": 3.0}, ["a", "b"])
    assert sample.other_answers == {"BUSY": 2}


def test_what_was_not_measured_has_no_figures() -> None:
    made = Cell("pod", "retrieve_cold", 4096, 1, samples=[Sample(notes=["why"])], note="").as_dict()
    assert (made["rate"], made["latency_us"], made["of"], made["cpu_s_per_unit"]) == ({}, {}, {}, {})
    assert made["notes"] == ["why (rounds: 1)"]
    assert spread([]) == {}
    assert percentiles([]) == {}
