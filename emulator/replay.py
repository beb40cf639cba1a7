"""One GPU node of the demo: an agent process that replays requests with real bytes (`python -m emulator.replay`).

Reads a request a line from standard input, does what an engine would (look up the longest prefix, RETRIEVE what is
there into registered memory, STORE the new blocks), checks every retrieved byte, and answers with one
`RequestOutcome` a line on standard output. Ends with its input. Started by `emulator.demo`, one per node.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from common import log
from common.config import load_file
from common.errors import EntresolError
from common.models import model_geometry
from common.status import BlockState, Status
from emulator.demo_report import RequestOutcome
from emulator.trace import TraceRecord
from emulator.workload import BlockShape
from host_agent.block_pattern import BlockPattern
from host_agent.client import Client
from host_agent.config import AgentSettings
from host_agent.memory import Spans

_IN_WINDOW = (BlockState.STAGED, BlockState.STAGED_AND_FLASH)


class Replayer:
    """Replays requests through one client. Registered memory for `batch_blocks` blocks stands for the GPU's cache;
    longer prefixes go through it batch by batch.

    A block lies in it in one piece, gathered from the engine's pages already; or, with `scatter`, as engines lay it
    out: one pool a layer, so that every STORE gathers a block from all layers and every RETRIEVE scatters it.
    """

    def __init__(self, client: Client, shape: BlockShape, tenant: str, batch_blocks: int, scatter: bool) -> None:
        record = shape.namespace(tenant)
        self._client = client
        self._shape = shape
        self._digest = record.digest()
        self._namespace = client.namespace(record, shape.block_bytes)
        self._batch_blocks = batch_blocks
        self._memory = client.allocate(batch_blocks * shape.block_bytes)
        self._pieces = shape.layer_pieces if scatter else 1
        self._pools = self._memory.array(np.uint64).reshape(self._pieces, batch_blocks, -1)
        self._pattern = BlockPattern(shape.block_bytes)

    def __enter__(self) -> Replayer:
        return self

    def __exit__(self, *_exception: object) -> None:
        del self._pools
        self._memory.close()

    def replay(self, record: TraceRecord) -> RequestOutcome:
        keys = self._shape.block_keys(self._digest, record)
        outcome = RequestOutcome(
            tokens=record.input_length,
            blocks=len(keys),
            hit_blocks=0,
            tokens_not_recomputed=0,
            calls={"store": [], "retrieve_staged": [], "retrieve_cold": []},
            statuses={},
            wrong=[],
        )
        statuses: Counter[str] = Counter()
        there = np.zeros(len(keys), np.bool_)
        if keys:
            found = self._client.lookup(self._namespace, keys)
            prefix, state = found.prefix_blocks, np.array(found.state)
            for start in range(0, prefix, self._batch_blocks):
                part = np.arange(start, min(start + self._batch_blocks, prefix))
                staged = np.isin(state[part], _IN_WINDOW)
                self._retrieve("retrieve_staged", keys, part[staged], there, outcome, statuses)
                self._retrieve("retrieve_cold", keys, part[~staged], there, outcome, statuses)
            absent = np.flatnonzero(~there)
            for start in range(0, len(absent), self._batch_blocks):
                self._store(keys, absent[start : start + self._batch_blocks], outcome, statuses)
        holes = np.flatnonzero(~there)
        outcome.hit_blocks = int(there.sum())
        outcome.tokens_not_recomputed = int(holes[0] if len(holes) else len(keys)) * self._shape.block_tokens
        outcome.statuses = dict(statuses)
        return outcome

    def _retrieve(
        self,
        operation: str,
        keys: Sequence[bytes],
        blocks: npt.NDArray[np.intp],
        there: npt.NDArray[np.bool_],
        outcome: RequestOutcome,
        statuses: Counter[str],
    ) -> None:
        """Into the memory's first places; `there` becomes true for each block that came back and is right."""
        if not len(blocks):
            return
        wanted = [keys[block] for block in blocks]
        block_bytes = self._shape.block_bytes
        places = self._places(len(wanted))
        started = perf_counter()
        results = self._client.retrieve(self._namespace, wanted, places)
        seconds = perf_counter() - started
        ok = np.array(results.status) == Status.OK
        outcome.calls[operation].append((int(ok.sum()), int(ok.sum()) * block_bytes, seconds))
        self._count("retrieve", results, statuses)
        for place in np.flatnonzero(ok):
            offset = self._pattern.first_mismatch_pieces(wanted[place], self._pools[:, place])
            if offset is None:
                there[blocks[place]] = True
            else:
                outcome.wrong.append(f"block {wanted[place].hex()} differs at byte {offset} of {block_bytes}")

    def _store(
        self, keys: Sequence[bytes], blocks: npt.NDArray[np.intp], outcome: RequestOutcome, statuses: Counter[str]
    ) -> None:
        fresh = [keys[block] for block in blocks]
        block_bytes = self._shape.block_bytes
        for place, key in enumerate(fresh):
            self._pattern.fill_pieces(key, self._pools[:, place])
        places = self._places(len(fresh))
        started = perf_counter()
        results = self._client.store(self._namespace, fresh, places)
        seconds = perf_counter() - started
        stored = int((np.array(results.status) == Status.OK).sum())
        outcome.calls["store"].append((stored, stored * block_bytes, seconds))
        self._count("store", results, statuses)

    def _places(self, blocks: int) -> Spans:
        """The first `blocks` places of the pools, each a scatter list over them."""
        piece_bytes = self._shape.block_bytes // self._pieces
        if self._pieces == 1:
            return self._memory.blocks(np.arange(blocks), piece_bytes)
        offsets = np.arange(blocks)[:, None] * piece_bytes + np.arange(self._pieces) * (
            piece_bytes * self._batch_blocks
        )
        flat = self._memory.spans(offsets.ravel(), piece_bytes)
        starts = np.arange(blocks + 1, dtype=np.intp) * self._pieces
        return Spans(flat.memories, None, flat.addresses, flat.lengths, starts)

    @staticmethod
    def _count(operation: str, results: Any, statuses: Counter[str]) -> None:
        for status, count in results.counts().items():
            if status is not Status.OK:
                statuses[f"{operation} {status.name}"] += count


@click.command()
@click.option("--config", "config_path", type=click.Path(path_type=Path), required=True)
@click.option("--name", required=True)
@click.option("--model", required=True)
@click.option("--tp-size", type=int, required=True)
@click.option("--block-tokens", type=int, required=True)
@click.option("--batch-blocks", type=int, required=True)
@click.option("--scatter", is_flag=True)
def main(
    config_path: Path, name: str, model: str, tp_size: int, block_tokens: int, batch_blocks: int, scatter: bool
) -> None:
    """Replay the requests of standard input until it ends."""
    try:
        settings = dataclasses.replace(load_file(config_path, AgentSettings), name=name)
        log.configure(settings.log)
        shape = BlockShape(model_geometry(model), tp_size=tp_size, block_tokens=block_tokens)
        with Client(settings) as client, Replayer(client, shape, settings.tenant, batch_blocks, scatter) as replayer:
            _say({"ready": name})
            for line in sys.stdin:
                record = TraceRecord(**json.loads(line))
                _say(dataclasses.asdict(replayer.replay(record)))
    except EntresolError as error:
        click.echo(f"{name}: {error}", err=True)
        raise SystemExit(error.exit_code) from error


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
