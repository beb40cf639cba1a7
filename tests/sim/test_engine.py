"""Thousands of seeded worlds (``ENTRESOL_SIM_SEEDS`` says how many), and proof that a broken engine is found out."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager

import pytest

from tests.sim import mutations
from tests.sim.run import failure_of, trace_of

SEEDS = int(os.environ.get("ENTRESOL_SIM_SEEDS", "2000"))
TIME_LIMIT_S = 75.0
"""After so long no more seeds are started, unless their number was asked for."""
SEEDS_MIN = 100
CHUNK = 20


def _failures(first: int, count: int) -> list[str]:
    found = []
    for seed in range(first, first + count):
        error = failure_of(seed)
        if error is not None:
            found.append(f"python -m tests.sim.run --seed {seed}  # {type(error).__name__}: {error}")
    return found


@pytest.mark.timeout(0)
def test_no_world_sees_a_broken_promise() -> None:
    deadline_s = time.monotonic() + TIME_LIMIT_S
    bounded = "ENTRESOL_SIM_SEEDS" not in os.environ
    done = 0
    failures: list[str] = []
    with ProcessPoolExecutor(os.cpu_count() or 1) as pool:
        chunks = {pool.submit(_failures, first, min(CHUNK, SEEDS - first)): first for first in range(0, SEEDS, CHUNK)}
        for future in as_completed(chunks):
            if future.cancelled():
                continue
            failures += future.result()
            done += min(CHUNK, SEEDS - chunks[future])
            if failures or (bounded and time.monotonic() > deadline_s and done >= SEEDS_MIN):
                pool.shutdown(wait=False, cancel_futures=True)
    print(f"{done} of {SEEDS} worlds tried")
    assert not failures, "\n".join(["a promise is broken; each line repeats one case:", *failures])


def test_a_seed_is_the_same_world_in_every_process() -> None:
    script = "from tests.sim.run import trace_of; print([trace_of(seed) for seed in range(3)])"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for hash_seed in ("1", "2")
    }
    assert outputs == {str([trace_of(seed) for seed in range(3)])}


@pytest.mark.parametrize("mutation", mutations.ALL, ids=lambda mutation: mutation.__name__)
def test_a_broken_engine_is_found_out(mutation: mutations.Mutation) -> None:
    broken: AbstractContextManager[object] = mutation()
    with broken:
        assert any(failure_of(seed) is not None for seed in range(mutations.SEEDS_MAX)), "no seed noticed"
