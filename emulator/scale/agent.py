"""One agent of the scale benchmark (`python -m emulator.scale.agent`): a process that runs loads when told to.

Connects to every pod that its plan names, stores a working set of each load on each, and says so in a line on
standard output; then makes ready for, and runs, the phase of each line on standard input, and answers with what its
calls took. Every retrieved byte is compared with what was stored, outside the timed calls. Ends with its input.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import secrets
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic, monotonic_ns, perf_counter, process_time, sleep, thread_time
from typing import Any, Final

import click
import numpy as np

from common import log
from common.config import load_file
from common.errors import EntresolError, UnavailableError
from common.status import Status
from emulator.scale.settings import OPERATIONS, Load
from host_agent.bench.namespace import bench_record
from host_agent.block_pattern import BlockPattern
from host_agent.client import Client
from host_agent.config import AgentSettings
from host_agent.memory import RegisteredMemory

_KEY_BYTES: Final = 16
_PREPARE_TIMEOUT_S: Final = 60.0
_BUSY_PAUSE_S: Final = 0.01
_DAMAGE_STEP_WORDS: Final = 512
"""One word of each 4 KiB page of a destination is damaged before a RETRIEVE, so that old bytes do not pass."""
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int


class LoadRunner:
    """One load on one pod: the batches that the agent keeps there, and the memory that they lie in here.

    Places are batches' places in `source`, used in turn; one is spare: a STORE takes it, and once all of its blocks are
    stored the oldest batch is spare.
    """

    def __init__(self, client: Client, load: Load, tenant: str, seed: int) -> None:
        self.load = load
        self._client = client
        self._random = random.Random(seed)
        self._namespace = client.namespace(
            bench_record(tenant, secrets.token_bytes(12) + seed.to_bytes(4, "little")), load.block_bytes
        )
        self._pattern = BlockPattern(load.block_bytes)
        self._source = client.allocate((load.working_batches + 1) * load.batch_bytes)
        self._destination = client.allocate(load.batch_bytes)
        self._keys: list[list[bytes]] = [_fresh_keys(load.batch) for _ in range(load.working_batches + 1)]
        self._spare = load.working_batches
        self._deck: list[str] = []
        """Calls to come: shuffled, but as many of each as the weights say, so that no agent has the longer ones."""
        self.statuses: Counter[str] = Counter()
        self.wrong: list[str] = []

    @property
    def memories(self) -> tuple[RegisteredMemory, ...]:
        return self._source, self._destination

    def prepare(self) -> None:
        """Store the working set; blocks that a busy region refuses are tried again. Raises UnavailableError."""
        deadline_s = monotonic() + _PREPARE_TIMEOUT_S
        for place in range(self.load.working_batches):
            self._fill(place)
            while not self._store(place):
                if monotonic() > deadline_s:
                    raise UnavailableError(f"the pod did not take the working set: {dict(self.statuses)}")
                sleep(_BUSY_PAUSE_S)
        self.statuses.clear()

    def warm(self) -> None:
        """Ask for the working set once, so that it is there and staged; what was evicted meanwhile is stored again.
        Raises UnavailableError."""
        deadline_s = monotonic() + _PREPARE_TIMEOUT_S
        spans = self._destination.blocks(np.arange(self.load.batch), self.load.block_bytes)
        for place in range(len(self._keys)):
            if place == self._spare:
                continue
            while not self._client.retrieve(self._namespace, self._keys[place], spans).all_ok:
                self._store(place)
                if monotonic() > deadline_s:
                    raise UnavailableError(f"the pod does not hold the working set: {dict(self.statuses)}")
        self.statuses.clear()

    def call(self) -> tuple[str, float, float, int]:
        """One call: the operation, its seconds, processor seconds of what surrounds it, blocks that succeeded."""
        if not self._deck:
            self._deck = [name for name, count in zip(OPERATIONS, self.load.weights) for _ in range(count)]
            self._random.shuffle(self._deck)
        operation = self._deck.pop()
        cpu_s = thread_time()
        if operation == "retrieve":
            seconds, within_s, blocks = self._call_retrieve()
        elif operation == "store":
            self._fill(self._spare)
            seconds, within_s, blocks = self._call_store()
        else:
            seconds, within_s, blocks = self._call_lookup()
        return operation, seconds, thread_time() - cpu_s - within_s, blocks

    def _call_retrieve(self) -> tuple[float, float, int]:
        load = self.load
        place = self._random.choice([place for place in range(load.working_batches + 1) if place != self._spare])
        self._destination.array(np.uint64)[::_DAMAGE_STEP_WORDS] ^= np.uint64(0x5A5A5A5A5A5A5A5A)
        spans = self._destination.blocks(np.arange(load.batch), load.block_bytes)
        cpu_s, started_s = thread_time(), perf_counter()
        results = self._client.retrieve(self._namespace, self._keys[place], spans)
        seconds, cpu_s = perf_counter() - started_s, thread_time() - cpu_s
        ok = np.asarray(results.status) == Status.OK
        self._count("retrieve", results)
        self._check(place, ok)
        if not ok.all():  # evicted meanwhile: as an engine would, make it again
            self._store(place)
        return seconds, cpu_s, int(ok.sum())

    def _call_store(self) -> tuple[float, float, int]:
        place = self._spare
        spans = self._places(place)
        cpu_s, started_s = thread_time(), perf_counter()
        results = self._client.store(self._namespace, self._keys[place], spans)
        seconds, cpu_s = perf_counter() - started_s, thread_time() - cpu_s
        self._count("store", results)
        if results.all_ok:
            self._spare = (self._spare + 1) % len(self._keys)
        self._keys[self._spare] = _fresh_keys(self.load.batch)
        return seconds, cpu_s, int((np.asarray(results.status) == Status.OK).sum())

    def _call_lookup(self) -> tuple[float, float, int]:
        known = [key for place, keys in enumerate(self._keys) if place != self._spare for key in keys]
        keys = self._random.choices(known, k=self.load.lookup_batch)
        cpu_s, started_s = thread_time(), perf_counter()
        found = self._client.lookup(self._namespace, keys)
        seconds, cpu_s = perf_counter() - started_s, thread_time() - cpu_s
        return seconds, cpu_s, int(np.count_nonzero(np.asarray(found.status) == Status.OK))

    def _store(self, place: int) -> bool:
        results = self._client.store(self._namespace, self._keys[place], self._places(place))
        self._count("store", results)
        return bool(np.isin(np.asarray(results.status), (Status.OK, Status.EXISTS)).all())

    def _places(self, place: int) -> Any:
        batch = self.load.batch
        return self._source.blocks(np.arange(place * batch, (place + 1) * batch), self.load.block_bytes)

    def _fill(self, place: int) -> None:
        size = self.load.block_bytes
        for index, key in enumerate(self._keys[place], place * self.load.batch):
            self._pattern.fill(key, self._source.view[index * size : (index + 1) * size])

    def _check(self, place: int, ok: Any) -> None:
        """Compare with what was stored, which names block and place in every 8-byte word."""
        size = self.load.block_bytes
        source = self._source.address + place * self.load.batch_bytes
        for index in np.flatnonzero(ok).tolist():
            if _memcmp(source + index * size, self._destination.address + index * size, size):
                self.wrong.append(f"block {self._keys[place][index].hex()} of {size} bytes differs")

    def _count(self, operation: str, results: Any) -> None:
        for status, count in results.counts().items():
            if status is not Status.OK:
                self.statuses[f"{operation} {status.name}"] += count


def run_phase(runner: LoadRunner, start_ns: int, end_ns: int) -> dict[str, Any]:
    """Call after call from `start_ns` to `end_ns` (monotonic clock). Only calls that ended by then count.

    "cpu_s" is of the whole process without what prepares and checks blocks outside the timed calls.
    """
    sleep(max(0.0, (start_ns - monotonic_ns()) / 1e9))
    calls: dict[str, list[float]] = {operation: [] for operation in OPERATIONS}
    blocks = dict.fromkeys(OPERATIONS, 0)
    outside_s = 0.0
    cpu_s = process_time()
    while monotonic_ns() < end_ns:
        operation, seconds, around_s, done = runner.call()
        outside_s += around_s
        if monotonic_ns() <= end_ns or not calls[operation]:
            calls[operation].append(seconds)
            blocks[operation] += done
    all_cpu_s = process_time() - cpu_s
    statuses, runner.statuses = dict(runner.statuses), Counter()
    wrong, runner.wrong = runner.wrong, []
    return {
        "calls_s": calls,
        "blocks": blocks,
        "bytes": (blocks["retrieve"] + blocks["store"]) * runner.load.block_bytes,
        "cpu_s": all_cpu_s - outside_s,
        "all_cpu_s": all_cpu_s,
        "statuses": statuses,
        "wrong": wrong,
    }


def _fresh_keys(count: int) -> list[bytes]:
    return [os.urandom(_KEY_BYTES) for _ in range(count)]


def plan(pods: Mapping[str, Path], loads: tuple[Load, ...]) -> str:
    """For `--plan`: the agents' configuration files by pod, and the loads."""
    return json.dumps(
        {"pods": {name: str(path) for name, path in pods.items()}, "loads": [asdict(load) for load in loads]}
    )


@click.command()
@click.option("--name", required=True)
@click.option("--number", type=int, required=True)
@click.option("--plan", "plan_text", required=True)
def main(name: str, number: int, plan_text: str) -> None:
    """Run the phases of standard input until it ends."""
    planned = json.loads(plan_text)
    loads = [Load(**{**fields, "weights": tuple(fields["weights"])}) for fields in planned["loads"]]
    try:
        with ExitStack() as stack:
            runners: dict[tuple[str, str], LoadRunner] = {}
            for pod, path in planned["pods"].items():
                settings = replace(load_file(Path(path), AgentSettings), name=name)
                log.configure(settings.log)
                client = stack.enter_context(Client(settings))
                for load in loads:
                    runner = LoadRunner(client, load, settings.tenant, number)
                    for memory in runner.memories:
                        stack.callback(memory.close)
                    runner.prepare()
                    runners[pod, load.name] = runner
            _say({"ready": name, "pid": os.getpid()})
            for line in sys.stdin:
                phase = json.loads(line)
                runner = runners[phase["pod"], phase["load"]]
                if "start_ns" in phase:
                    _say(run_phase(runner, phase["start_ns"], phase["end_ns"]))
                else:
                    runner.warm()
                    _say({"warm": name})
    except EntresolError as error:
        click.echo(f"{name}: {error}", err=True)
        raise SystemExit(error.exit_code) from error


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
