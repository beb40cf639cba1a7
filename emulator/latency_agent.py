"""The processes of `entresol-emu bench-latency`: one that measures, one that stores, one that watches the machine.

`python -m emulator.latency_agent ROLE` obeys lines of JSON on standard input and answers each with one line. The probe
sends one-block requests by a timetable, not when the last one was answered, so that a pause counts for every request
that fell into it (open loop). Started by `emulator.latency`; ends with its input.
"""

from __future__ import annotations

import contextlib
import json
import select
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

from common import log
from common.config import load_file
from common.errors import EntresolError
from common.status import Status
from host_agent.bench.namespace import bench_record
from host_agent.block_pattern import BlockPattern
from host_agent.client import Client
from host_agent.config import AgentSettings

KEY_BYTES: Final = 16
PROBE_KEYS: Final = 16
"""Few, so that each is used often enough to stay in the window among stores."""
PROBE_BLOCK_BYTES: Final = 4096
_PIN_S: Final = 3600
_SPIN_NS: Final = 150_000
"""Before a request is due the probe stays awake for so long: a timer alone is late by about as much."""
_JITTER_SLEEP_S: Final = 0.001
_TTL_S: Final = 2
_KEPT_BATCHES: Final = 32
_BUSY_PAUSE_S: Final = 0.002


class Timetable:
    """Times at which requests are due. A request that is not sent when it is due is late by our own pause or the
    machine's if nothing was outstanding, and by the pod's if the one before was still unanswered."""

    def __init__(self, rate_per_s: float, clock_ns: Callable[[], int], sleep: Callable[[float], None]) -> None:
        self._step_ns = int(1e9 / rate_per_s)
        self._clock_ns = clock_ns
        self._sleep = sleep
        self._due_ns = clock_ns()
        self._free_ns = self._due_ns
        self.sent_ns = self._due_ns
        """When the last request was sent in fact."""
        self.late_ns: list[int] = []
        """Of requests that had nothing to wait for: not the pod's doing, and not in `latencies_ns`."""

    def wait(self) -> int:
        """Until the next request is due; the time from which its latency counts."""
        self._due_ns += self._step_ns
        now = self._clock_ns()
        if now < self._due_ns - _SPIN_NS:
            self._sleep((self._due_ns - _SPIN_NS - now) / 1e9)
        while (now := self._clock_ns()) < self._due_ns:
            pass
        self.sent_ns = now
        if self._free_ns > self._due_ns:
            return self._due_ns
        self.late_ns.append(now - self._due_ns)
        return now

    def answered(self) -> int:
        """The request's answer is here; the time."""
        self._free_ns = self._clock_ns()
        return self._free_ns


class Probe:
    """Alternates one-block RETRIEVEs and LOOKUPs. Every byte that comes back is compared, outside the timed part."""

    def __init__(self, client: Client, tenant: str, salt: str, block_bytes: int) -> None:
        self._client = client
        self._namespace = client.namespace(bench_record(tenant, salt.encode()), block_bytes)
        self._pattern = BlockPattern(PROBE_BLOCK_BYTES)
        self._memory = client.allocate(PROBE_BLOCK_BYTES)
        self._keys = [
            np.random.default_rng([7, i]).integers(0, 256, KEY_BYTES, np.uint8).tobytes() for i in range(PROBE_KEYS)
        ]
        self._place = self._memory.spans([0], PROBE_BLOCK_BYTES)

    def prepare(self) -> None:
        """Store the blocks, and pin them: what is measured is a block that is there."""
        for key in self._keys:
            self._pattern.fill(key, self._memory.view)
            self._client.store(self._namespace, [key], self._place)
        self._client.pin(self._namespace, self._keys, ttl_s=_PIN_S)

    def run(self, requests: int, rate_per_s: float) -> dict[str, Any]:
        """`latencies_ns` by operation, `calls_ns` from when each was sent in fact, `late_ns` of the probe itself, and
        how many answers were others than OK."""
        timetable = Timetable(rate_per_s, time.perf_counter_ns, time.sleep)
        latencies: dict[str, list[int]] = {"RETRIEVE": [], "LOOKUP": []}
        calls: dict[str, list[int]] = {"RETRIEVE": [], "LOOKUP": []}
        others: Counter[str] = Counter()
        wrong = 0
        for number in range(requests):
            key = self._keys[number // 2 % PROBE_KEYS]
            retrieves = number % 2 == 0
            if retrieves:
                self._memory.view[:8] = bytes(8)  # old bytes do not pass
            began = timetable.wait()
            if retrieves:
                status = int(self._client.retrieve(self._namespace, [key], self._place).status[0])
            else:
                found = self._client.lookup(self._namespace, [key]).prefix_blocks
                status = Status.OK if found == 1 else Status.MISS
            ended = timetable.answered()
            operation = "RETRIEVE" if retrieves else "LOOKUP"
            latencies[operation].append(ended - began)
            calls[operation].append(ended - timetable.sent_ns)
            if status != Status.OK:
                others[Status(status).name] += 1
            elif retrieves and self._pattern.first_mismatch(key, self._memory.view) is not None:
                wrong += 1
        return {
            "latencies_ns": latencies,
            "calls_ns": calls,
            "late_ns": timetable.late_ns,
            "others": dict(others),
            "wrong": wrong,
        }


class Storer:
    """Stores fresh blocks as fast as they are taken, so that the region evicts and flushes without end; gives some a
    TTL, and deletes some."""

    def __init__(self, client: Client, tenant: str, salt: str, block_bytes: int, batch: int) -> None:
        self._client = client
        self._namespace = client.namespace(bench_record(tenant, salt.encode()), block_bytes)
        self._memory = client.allocate(block_bytes * batch)
        self._memory.array(np.uint64)[:] = np.random.default_rng(1).integers(0, 1 << 63, self._memory.view.nbytes // 8)
        self._places = self._memory.spans([i * block_bytes for i in range(batch)], block_bytes)
        self._block_bytes, self._batch = block_bytes, batch
        self._random = np.random.default_rng()
        self._kept: list[list[bytes]] = []

    def run(self, stopped: Callable[[], bool]) -> dict[str, Any]:
        """Until told to stop. Blocks by status, and how long it took."""
        statuses: Counter[str] = Counter()
        began = time.perf_counter()
        turn = 0
        while not stopped():
            turn += 1
            data = self._random.bytes(KEY_BYTES * self._batch)
            keys = [data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)]
            results = self._client.store(self._namespace, keys, self._places, ttl_s=_TTL_S if turn % 8 == 0 else 0)
            counts = Counter(Status(int(status)).name for status in results.status)
            statuses += counts
            if counts["OK"] == 0:
                time.sleep(_BUSY_PAUSE_S)
            self._kept.append(keys)
            if len(self._kept) > _KEPT_BATCHES:
                oldest = self._kept.pop(0)
                if turn % 16 == 0:
                    self._client.delete(self._namespace, oldest)
        seconds = time.perf_counter() - began
        return {
            "statuses": dict(statuses),
            "seconds": seconds,
            "block_bytes": self._block_bytes,
            "batch": self._batch,
            "gb_per_s": statuses["OK"] * self._block_bytes / seconds / 1e9,
        }


def watch(stopped: Callable[[], bool]) -> dict[str, Any]:
    """Sleep a millisecond at a time until told to stop: by how much each sleep was too long is what this machine did to
    a process that asked for next to nothing."""
    over: list[int] = []
    while not stopped():
        for _ in range(32):
            began = time.perf_counter_ns()
            time.sleep(_JITTER_SLEEP_S)
            over.append(time.perf_counter_ns() - began - int(_JITTER_SLEEP_S * 1e9))
    return {"over_ns": over}


class Orders:
    """Lines of JSON on standard input."""

    def __init__(self) -> None:
        self._input = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115  unbuffered, for `waiting`

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for line in iter(self._input.readline, b""):
            yield json.loads(line)

    def waiting(self) -> bool:
        """Whether another line, or the end, has come."""
        return bool(select.select([self._input], [], [], 0)[0])


def _answer(values: dict[str, Any]) -> None:
    print(json.dumps(values), flush=True)


@click.command()
@click.argument("role", type=click.Choice(["probe", "store", "watch"]))
@click.option("--config", "config_path", type=click.Path(path_type=Path), help="Of the agent; all but watch need it.")
@click.option("--salt", default="", help="Of the namespace.")
@click.option("--block-bytes", type=int, default=65536)
@click.option("--batch", type=int, default=1)
def main(role: str, config_path: Path | None, salt: str, block_bytes: int, batch: int) -> None:
    """Serve `emulator.latency`. Orders are ``{"requests": N, "rate_per_s": R}`` for the probe; the others run from
    one order to the next, which says stop."""
    orders = Orders()
    with contextlib.ExitStack() as stack:
        run: Callable[[dict[str, Any]], dict[str, Any]]
        if role == "watch":
            run = lambda _: watch(orders.waiting)  # noqa: E731
        else:
            if config_path is None:
                raise click.UsageError("--config is needed")
            settings = load_file(config_path, AgentSettings)
            log.configure(settings.log)
            client = stack.enter_context(Client(settings))
            if role == "probe":
                probe = Probe(client, settings.tenant, salt, block_bytes)
                probe.prepare()
                run = lambda order: probe.run(int(order["requests"]), float(order["rate_per_s"]))  # noqa: E731
            else:
                storer = Storer(client, settings.tenant, salt, block_bytes, batch)
                run = lambda _: storer.run(orders.waiting)  # noqa: E731
        _answer({"ready": True})
        for order in orders:
            if not order.get("stop"):
                _answer(run(order))


if __name__ == "__main__":
    try:
        main()
    except EntresolError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        sys.exit(error.exit_code)
