"""Repeat one seed of the simulation, or try many: ``python -m tests.sim.run --seed N [--count M]``."""

from __future__ import annotations

import argparse
import sys
import traceback

from tests.sim.scenario import Scenario
from tests.sim.world import World


def failure_of(seed: int) -> BaseException | None:
    """What goes wrong in the world of `seed`, or None."""
    try:
        World(Scenario.of(seed)).run()
    except Exception as error:  # noqa: BLE001 - whatever the engine raises is a finding, too
        return error
    return None


def failures_in(first: int, count: int) -> list[str]:
    """For each of the seeds from `first` on that fails, the line that repeats it and what it comes to."""
    found = []
    for seed in range(first, first + count):
        error = failure_of(seed)
        if error is not None:
            found.append(f"python -m tests.sim.run --seed {seed}  # {type(error).__name__}: {error}")
    return found


def trace_of(seed: int) -> str:
    """A digest of all that the engine did in the world of `seed`: the same in every process."""
    world = World(Scenario.of(seed))
    world.run()
    return world.trace.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=1, help="how many seeds to try, from --seed on")
    arguments = parser.parse_args()
    failed = 0
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        for line in failures_in(seed, 1):
            failed += 1
            print(line, flush=True)
    print(f"{arguments.count - failed} of {arguments.count} worlds held")
    if failed and arguments.count == 1:
        print(Scenario.of(arguments.seed))
        traceback.print_exception(failure_of(arguments.seed))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
