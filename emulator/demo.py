"""The demo: a pod, two GPU nodes, and part of a multi-turn workload replayed through them with real bytes.

Composes what others own (`emulator.pod`, `emulator.workload`, `emulator.replay`), hands each request to whichever
node is free, and adds up what they say. Leaves nothing running and nothing on disk, unless asked to keep the pod.
"""

from __future__ import annotations

import contextlib
import dataclasses
import selectors
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

from common.errors import UnavailableError, UserError
from common.identity import UNKNOWN
from common.models import model_geometry
from dpu_app.config import BLOCK_BYTES
from emulator.demo_report import DemoReport, RequestOutcome
from emulator.json_process import JsonProcess
from emulator.pod import Pod
from emulator.pod_settings import PodSettings
from emulator.pod_status import dpu_status
from emulator.trace import TraceRecord, read_trace, select_conversations
from emulator.workload import BlockShape, WorkloadGenerator, WorkloadSettings
from host_agent.config import NamespaceSettings

_REQUEST_TIMEOUT_S: Final = 120.0
_BATCH_BLOCKS_MAX: Final = 64
_FRAMES_PER_BATCH_BLOCK: Final = 16
_FLUSH_TIMEOUT_S: Final = 20.0
_FLUSH_POLL_S: Final = 0.05


@dataclass(frozen=True)
class DemoSettings:
    """What to replay and how."""

    pod: PodSettings
    requests: int = 96
    agents: int = 2
    trace: Path | None = None
    """A file in the Mooncake format; None: the project's own workload."""
    seed: int = 1
    model: str = "Llama-3-8B"
    tp_size: int = 8
    block_tokens: int = 16
    batch_blocks: int = 0
    """Of one call; 0: up to 64, and no more than a sixteenth of the windows' frames, so that two nodes that store do
    not fill them with what has not reached flash."""
    scatter: bool = False
    """See `emulator.replay.Replayer`."""

    @classmethod
    def of(cls, pod: PodSettings, **values: Any) -> DemoSettings:
        """Slots as large as the blocks, and the agents' configuration file naming the demo's own namespace, so that
        the command line sees its blocks. Raises UserError."""
        settings = cls(pod, **values)
        shape = settings.shape()
        record = dataclasses.asdict(shape.namespace(pod.tenant))
        del record["tenant"], record["salt"]
        named: dict[str, Any] = {name: None if value is UNKNOWN else value for name, value in record.items()}
        slot_bytes = -(-shape.block_bytes // BLOCK_BYTES) * BLOCK_BYTES
        pod = dataclasses.replace(pod, slot_bytes=slot_bytes, namespace=NamespaceSettings(**named))
        frames = pod.dpus * pod.regions * (pod.window_bytes // slot_bytes)
        batch_blocks = settings.batch_blocks or max(1, min(_BATCH_BLOCKS_MAX, frames // _FRAMES_PER_BATCH_BLOCK))
        return dataclasses.replace(settings, pod=pod, batch_blocks=batch_blocks)

    def shape(self) -> BlockShape:
        """Raises UserError."""
        return BlockShape(model_geometry(self.model), tp_size=self.tp_size, block_tokens=self.block_tokens)

    def records(self) -> list[TraceRecord]:
        """The requests, in order of time. Raises UserError."""
        if self.trace is None:
            return list(islice(WorkloadGenerator(WorkloadSettings(seed=self.seed)).records(), self.requests))
        records = select_conversations(read_trace(self.trace), self.requests)
        if not records:
            raise UserError(f"{self.trace} holds no requests")
        return records


def run_demo(
    pod: Pod, settings: DemoSettings, records: Sequence[TraceRecord], done: Callable[[RequestOutcome], None]
) -> DemoReport:
    """Replay `records` through a pod that is up, and wait until all that was stored is on flash. `done` hears of
    each request.

    Raises UnavailableError where a node or the pod fails. Wrong bytes are in the report, not raised.
    """
    shape = settings.shape()
    report = DemoReport(
        setup={
            "fabric": settings.pod.fabric,
            "model": shape.model.name,
            "kv_dtype": shape.model.kv_dtype,
            "block_tokens": shape.block_tokens,
            "block_bytes": shape.block_bytes,
            "tp_size": shape.tp_size,
            "pieces": shape.layer_pieces if settings.scatter else 1,
            "dpus": settings.pod.dpus,
            "regions": settings.pod.dpus * settings.pod.regions,
            "agents": settings.agents,
            "workload": str(settings.trace or f"generated, seed {settings.seed}"),
        }
    )
    before = pod_counters(pod)
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(_node(pod, settings, number)) for number in range(settings.agents)]
        started_s = time.monotonic()
        for outcome in _replay(nodes, records):
            report.add(outcome)
            done(outcome)
        report.seconds = time.monotonic() - started_s
    _wait_flushed(pod)
    after = pod_counters(pod)
    report.counters = {name: after[name] - before.get(name, 0) for name in sorted(after)}
    return report


def pod_counters(pod: Pod) -> dict[str, int]:
    """The counters of all regions, added by name. Raises UnavailableError."""
    totals: dict[str, int] = {}
    for dpu in pod.state.dpus:
        for region in dpu_status(dpu.control).regions:
            for name, value in region.stats.items():
                totals[name] = totals.get(name, 0) + value
    return totals


def _wait_flushed(pod: Pod) -> None:
    """What is staged reaches flash in the background; only then does the count of flash bytes mean something."""
    deadline_s = time.monotonic() + _FLUSH_TIMEOUT_S
    while pod_counters(pod).get("FRAMES_DIRTY", 0):
        if time.monotonic() > deadline_s:
            raise UnavailableError(f"stored blocks were still not on flash after {_FLUSH_TIMEOUT_S:g} s")
        time.sleep(_FLUSH_POLL_S)


@contextlib.contextmanager
def _node(pod: Pod, settings: DemoSettings, number: int) -> Iterator[JsonProcess]:
    """One agent process, which has ended on exit."""
    name = f"gpu-node-{number}"
    arguments = ["--config", str(pod.state.agent_config), "--name", name]
    arguments += ["--model", settings.model, "--tp-size", str(settings.tp_size)]
    arguments += ["--block-tokens", str(settings.block_tokens), "--batch-blocks", str(settings.batch_blocks)]
    arguments += ["--scatter"] if settings.scatter else []
    node = JsonProcess(name, "emulator.replay", arguments, pod.state.mark)
    try:
        yield node
    except BaseException:
        node.ask_to_end(now=True)
        raise
    finally:
        node.close()


def _replay(nodes: Sequence[JsonProcess], records: Sequence[TraceRecord]) -> Iterator[RequestOutcome]:
    """Hand out requests in their order, the next one to whichever node is free. A node's first line says that it
    has connected."""
    waiting = deque(records)
    busy = set(nodes)
    with selectors.DefaultSelector() as selector:
        for node in nodes:
            selector.register(node.output, selectors.EVENT_READ, node)
        while busy:
            events = selector.select(_REQUEST_TIMEOUT_S)
            if not events:
                names = ", ".join(sorted(node.name for node in busy))
                raise UnavailableError(f"no answer from {names} for {_REQUEST_TIMEOUT_S:g} s")
            for key, _mask in events:
                free: JsonProcess = key.data
                for message in free.heard():
                    if "ready" not in message:
                        yield RequestOutcome(**message)
                    if waiting:
                        free.tell(waiting.popleft()._asdict())
                    else:
                        busy.discard(free)
