"""NIXL: one agent's registered memory written to and read from by another, over UCX; and files through POSIX.

There is no key, index or checksum in it: the adapter gives each key a place in the target's memory, in no order, so
that a batch is as many pieces as it has blocks. Descriptor lists are prepared once, as its documentation advises, and
a call is `make_prepped_xfer`, `transfer`, and polling until done.
"""

from __future__ import annotations

import base64
import os
import random
from typing import Any

_POOL_BYTES = 640 << 20


def _agent(name: str, options: dict[str, Any]) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    config = nixl_agent_config(
        backends=[], enable_prog_thread=options["progress_thread"], num_threads=options.get("num_threads", 0)
    )
    agent = nixl_agent(name, config)
    agent.create_backend(options["backend"], options.get("parameters", {}))
    return agent


def serve(options: dict[str, Any], allocate: Any) -> tuple[dict[str, Any], Any]:
    """The target: memory, registered. It does nothing else."""
    agent = _agent("target", {**options, "progress_thread": True})
    memory = allocate(_POOL_BYTES, options["huge"])
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    facts = {
        "metadata": base64.b64encode(agent.get_agent_metadata()).decode(),
        "address": memory.ctypes.data,
        "length": memory.nbytes,
    }
    return facts, (agent, memory)


class Adapter:
    def __init__(self, options: dict[str, Any]) -> None:
        import importlib.metadata as metadata

        self._version = ", ".join(f"{name} {metadata.version(name)}" for name in ("nixl", "nixl-cu12"))
        self._options = options
        self._agent = _agent("client", options)
        self._target = ""
        if "target" in options:
            name = self._agent.add_remote_agent(base64.b64decode(options["target"]["metadata"]))
            self._target = name.decode() if isinstance(name, bytes) else name
        self._registered: list[Any] = []
        self._file = -1

    def about(self) -> dict[str, str]:
        return {"version": self._version}

    def prepare(self, block_bytes: int, blocks: int, source: Any, destination: Any) -> None:
        for old in self._registered:
            self._agent.deregister_memory(old)
        memories = (source, destination)
        self._registered = [
            self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM") for memory in memories
        ]
        self._memories = memories
        self._local = [
            self._agent.prep_xfer_dlist(
                "", [(memory.ctypes.data + place * block_bytes, block_bytes, 0) for place in range(blocks)], "DRAM"
            )
            for memory in memories
        ]
        self._bytes, self._blocks = block_bytes, blocks
        self._prepare_remote()

    def _prepare_remote(self) -> None:
        size = self._bytes
        if self._target:
            target = self._options["target"]
            count = target["length"] // size
            places = [(target["address"] + place * size, size, 0) for place in range(count)]
            self._remote = self._agent.prep_xfer_dlist(self._target, places, "DRAM")
        else:
            count = max(2 * self._blocks, 64)
            path = os.path.join(self._options["directory"], f"file{size}")
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
            os.posix_fallocate(self._file, 0, count * size)
            self._registered.append(self._agent.register_memory([(0, count * size, self._file, "")], "FILE"))
            self._remote = self._agent.prep_xfer_dlist(
                self._agent.name, [(place * size, size, self._file) for place in range(count)], "FILE"
            )
        self._free = list(range(count))
        random.Random(1).shuffle(self._free)
        self._slots: dict[bytes, int] = {}

    def store(self, keys: list[bytes], first: int) -> int:
        slots = [self._free.pop() for _ in keys]
        self._slots.update(zip(keys, slots))
        return self._transfer("WRITE", 0, first, slots)

    def retrieve(self, keys: list[bytes], first: int) -> int:
        return self._transfer("READ", 1, first, [self._slots[key] for key in keys])

    flash_store = store
    flash_read = retrieve

    def flash_ready(self, _keys: list[bytes]) -> None:
        """O_DIRECT: nothing is in the page cache."""
        os.fsync(self._file)

    def forget(self, keys: list[bytes]) -> None:
        self._free = [*(self._slots.pop(key) for key in keys if key in self._slots), *self._free]

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)

    def _transfer(self, operation: str, side: int, first: int, slots: list[int]) -> int:
        agent = self._agent
        places = list(range(first, first + len(slots)))
        handle = agent.make_prepped_xfer(operation, self._local[side], places, self._remote, slots)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"{operation} ended in state {state}")
        agent.release_xfer_handle(handle)
        return len(slots)
