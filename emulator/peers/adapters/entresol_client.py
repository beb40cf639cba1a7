"""Entresol itself, by the same driver: the blocking `Client` of one agent, memory that the fabric allocates.

The only adapter that imports this project.
"""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import Any

import numpy as np

from common.config import load_file
from common.status import BlockState, Status
from host_agent.client import Client
from host_agent.config import AgentSettings, NamespaceSettings

_SETTLE_TIMEOUT_S = 30.0
_SETTLE_POLL_S = 0.002


class Adapter:
    def __init__(self, options: dict[str, Any]) -> None:
        self._verify = bool(options["verify"])
        agent = load_file(Path(options["agent"]), AgentSettings)
        self._client = Client(agent)
        record = NamespaceSettings(model_id="entresol-peers", salt=secrets.token_hex(8)).record(agent.tenant)
        self._namespace = self._client.namespace(record, options["block_bytes_max"])
        self._memories: list[Any] = []
        self._filler: list[bytes] = []

    def about(self) -> dict[str, str]:
        from host_agent.session import client_version

        return {"version": client_version()}

    def allocate(self, length_bytes: int) -> Any:
        memory = self._client.allocate(length_bytes)
        self._memories.append(memory)
        array = memory.array(np.uint8)
        array[:] = 0
        return array

    def prepare(self, block_bytes: int, blocks: int, _source: Any, _destination: Any) -> None:
        self._bytes, self._blocks = block_bytes, blocks
        self._source, self._to = self._memories[-2:]

    def store(self, keys: list[bytes], first: int) -> int:
        places = self._source.blocks(np.arange(first, first + len(keys)), self._bytes)
        return _done(self._client.store(self._namespace, keys, places, verify=self._verify))

    def flash_store(self, keys: list[bytes], first: int) -> int:
        places = self._source.blocks(np.arange(first, first + len(keys)), self._bytes)
        return _done(self._client.store(self._namespace, keys, places, until_flash=True, verify=self._verify))

    def retrieve(self, keys: list[bytes], first: int) -> int:
        places = self._to.blocks(np.arange(first, first + len(keys)), self._bytes)
        return _done(self._client.retrieve(self._namespace, keys, places, verify=self._verify))

    flash_read = retrieve

    def names(self, keys: list[bytes]) -> Any:
        return np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1)

    def lookup(self, keys: Any) -> int:
        return int(np.count_nonzero(self._client.lookup(self._namespace, keys).state != BlockState.ABSENT))

    def settle(self, keys: list[bytes]) -> None:
        """Wait until the flush in the background has come to its end."""
        deadline_s = time.monotonic() + _SETTLE_TIMEOUT_S
        while (self._client.lookup(self._namespace, keys).state == BlockState.STAGED).any():
            if time.monotonic() > deadline_s:
                raise TimeoutError("blocks did not reach flash")
            time.sleep(_SETTLE_POLL_S)

    def flash_ready(self, keys: list[bytes]) -> None:
        """Store other blocks until none of `keys` is left in a window."""
        deadline_s = time.monotonic() + _SETTLE_TIMEOUT_S
        places = self._source.blocks(np.arange(self._blocks), self._bytes)
        while (self._client.lookup(self._namespace, keys).state != BlockState.FLASH).any():
            if time.monotonic() > deadline_s:
                raise TimeoutError("blocks stayed in the windows")
            fresh = [os.urandom(16) for _ in range(self._blocks)]
            self._filler += fresh
            self._client.store(self._namespace, fresh, places)
            self.settle(fresh)

    def forget(self, keys: list[bytes]) -> None:
        self.settle(keys)
        self._client.delete(self._namespace, [*keys, *self._filler])
        self._filler.clear()

    def close(self) -> None:
        self._client.close()


def _done(results: Any) -> int:
    return int(np.count_nonzero(results.status == Status.OK))
