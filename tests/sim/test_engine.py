"""Thousands of seeded worlds (``ENTRESOL_SIM_SEEDS`` says how many), and proof that a broken engine is found out."""

from __future__ import annotations

import math
import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import AbstractContextManager

import pytest

from tests.sim import mutations
from tests.sim.run import failure_of, failures_in, trace_of

SEEDS = int(os.environ.get("ENTRESOL_SIM_SEEDS", "2000"))
TIME_LIMIT_S = 60.0
"""After so long no more seeds are started, unless their number was asked for."""
SEEDS_MIN = 100
CHUNK = 20


@pytest.mark.timeout(0)
def test_no_world_sees_a_broken_promise() -> None:
    deadline_s = math.inf if "ENTRESOL_SIM_SEEDS" in os.environ else time.monotonic() + TIME_LIMIT_S
    workers = os.cpu_count() or 1
    failures: list[str] = []
    started = 0
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        running: set[Future[list[str]]] = set()
        while True:
            while len(running) < 2 * workers and started < SEEDS and not failures and time.monotonic() < deadline_s:
                count = min(CHUNK, SEEDS - started)
                running.add(pool.submit(failures_in, started, count))
                started += count
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            failures += [line for future in done for line in future.result()]
    print(f"{started} of {SEEDS} worlds tried")
    assert not failures, "\n".join(["a promise is broken; each line repeats one case:", *failures])
    assert started >= min(SEEDS, SEEDS_MIN), f"only {started} worlds in {TIME_LIMIT_S:.0f} s: this machine is too slow"


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
