"""Mooncake: its store with the zero-copy calls `batch_put_from` and `batch_get_into` on registered memory, and its
transfer engine's batch transfers.

The store's client either moves bytes over TCP itself ("embedded") or lets the store process on the same host copy
them through shared memory ("dummy", its name for a client without storage).
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import random
import time
from typing import Any

import numpy as np

_POOL_BYTES = 640 << 20
_LOCAL_BUFFER_BYTES = 64 << 20
_OFFLOAD_TIMEOUT_S = 30.0
_OFFLOAD_POLL_S = 0.02
_HOST = "127.0.0.1"
_PEER_TO_PEER = "P2PHANDSHAKE"


def _version() -> dict[str, str]:
    name = "mooncake-transfer-engine-non-cuda"
    return {"version": f"{name} {importlib.metadata.version(name)}"}


def _check(code: int, call: str) -> None:
    if code:
        raise RuntimeError(f"{call} gave {code}")


class Store:
    """Keys, values, replicas in memory of one other process; no checksums as it is shipped."""

    def __init__(self, options: dict[str, Any]) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store = MooncakeDistributedStore()
        self._dummy = options["client"] == "dummy"
        if self._dummy:
            pool = options["pool_bytes"]
            address = f"{_HOST}:{options['client_port']}"
            _check(self._store.setup_dummy(pool, _LOCAL_BUFFER_BYTES, address), "setup_dummy")
            self.allocate = self._allocate
        else:
            master = f"{_HOST}:{options['master_port']}"
            code = self._store.setup(_HOST, _PEER_TO_PEER, 0, _LOCAL_BUFFER_BYTES, "tcp", "", master)
            _check(code, "setup")
        self._kept: list[Any] = []

    def about(self) -> dict[str, str]:
        return _version()

    def _allocate(self, length_bytes: int) -> Any:
        """Of the memory that the dummy client shares with the store's process."""
        address = self._store.alloc_from_mem_pool(length_bytes)
        if not address:
            raise MemoryError(f"alloc_from_mem_pool of {length_bytes} bytes")
        memory: Any = np.ctypeslib.as_array((ctypes.c_uint8 * length_bytes).from_address(address))
        memory[:] = 0
        return memory

    def prepare(self, block_bytes: int, blocks: int, source: Any, destination: Any) -> None:
        self._bytes = block_bytes
        self._source, self._to = source.ctypes.data, destination.ctypes.data
        for memory in (source, destination):
            _check(self._store.register_buffer(memory.ctypes.data, memory.nbytes), "register_buffer")
        self._kept.append((source, destination))
        self._sizes = [block_bytes] * blocks

    def store(self, keys: list[bytes], first: int) -> int:
        size, start = self._bytes, self._source + first * self._bytes
        places = list(range(start, start + len(keys) * size, size))
        names = [key.decode() for key in keys]
        return int(self._store.batch_put_from(names, places, self._sizes[: len(keys)]).count(0))

    def retrieve(self, keys: list[bytes], first: int) -> int:
        size, start = self._bytes, self._to + first * self._bytes
        places = list(range(start, start + len(keys) * size, size))
        names = [key.decode() for key in keys]
        return int(self._store.batch_get_into(names, places, self._sizes[: len(keys)]).count(size))

    def names(self, keys: list[bytes]) -> list[str]:
        return [key.decode() for key in keys]

    def lookup(self, names: list[str]) -> int:
        return int(self._store.batch_is_exist(names).count(1))

    def forget(self, keys: list[bytes]) -> None:
        self._store.batch_remove([key.decode() for key in keys], True)

    def close(self) -> None:
        self._store.close()


class Offload(Store):
    """The store in this process with its flash tier: what was put is offloaded in the background; for a read from
    flash, `flash_ready` waits for that and clears the replicas in memory."""

    def __init__(self, options: dict[str, Any]) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._dir = options["directory"]
        self._store = MooncakeDistributedStore()
        master, segment = f"{_HOST}:{options['master_port']}", options["segment_bytes"]
        given = (_HOST, _PEER_TO_PEER, segment, _LOCAL_BUFFER_BYTES, "tcp", "", master, None, True, self._dir)
        _check(self._store.setup(*given), "setup")
        self._kept = []

    def flash_store(self, keys: list[bytes], first: int) -> int:
        return self.store(keys, first)

    def flash_read(self, keys: list[bytes], first: int) -> int:
        return self.retrieve(keys, first)

    def flash_ready(self, keys: list[bytes]) -> None:
        names = self.names(keys)
        deadline_s = time.monotonic() + _OFFLOAD_TIMEOUT_S
        while not all(
            any(replica.is_local_disk_replica() for replica in replicas)
            for replicas in self._store.batch_get_replica_desc(names).values()
        ):
            if time.monotonic() > deadline_s:
                raise TimeoutError("blocks were not offloaded")
            time.sleep(_OFFLOAD_POLL_S)
        left = set(names)
        while left:  # each once its lease has expired
            left.difference_update(self._store.batch_replica_clear(list(left), self._store.get_hostname()))
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"replicas in memory of {len(left)} blocks were not cleared")
            time.sleep(_OFFLOAD_POLL_S)
        for entry in os.scandir(self._dir):  # its files are read through the page cache
            if entry.is_file():
                with open(entry.path, "rb") as file:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _engine() -> Any:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    _check(engine.initialize(_HOST, _PEER_TO_PEER, "tcp", ""), "initialize")
    return engine


def serve(options: dict[str, Any], allocate: Any) -> tuple[dict[str, Any], Any]:
    """The transfer engine's target: registered memory that another engine writes and reads."""
    engine = _engine()
    memory = allocate(_POOL_BYTES, options["huge"])
    _check(engine.register_memory(memory.ctypes.data, memory.nbytes), "register_memory")
    facts = {"session": f"{_HOST}:{engine.get_rpc_port()}", "address": memory.ctypes.data, "length": memory.nbytes}
    return facts, (engine, memory)


class Engine:
    """No keys: the adapter gives each a place in the target's memory, in no order."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._engine = _engine()
        self._target = options["target"]
        self._registered: list[Any] = []

    def about(self) -> dict[str, str]:
        return _version()

    def prepare(self, block_bytes: int, blocks: int, source: Any, destination: Any) -> None:
        for memory in self._registered:
            self._engine.unregister_memory(memory.ctypes.data)
        self._registered = [source, destination]
        for memory in self._registered:
            _check(self._engine.register_memory(memory.ctypes.data, memory.nbytes), "register_memory")
        self._bytes = block_bytes
        self._source, self._to = source.ctypes.data, destination.ctypes.data
        self._sizes = [block_bytes] * blocks
        self._free = list(range(self._target["length"] // block_bytes))
        random.Random(1).shuffle(self._free)
        self._slots: dict[bytes, int] = {}

    def store(self, keys: list[bytes], first: int) -> int:
        slots = [self._free.pop() for _ in keys]
        self._slots.update(zip(keys, slots))
        return self._transfer(self._engine.batch_transfer_sync_write, self._source, first, slots)

    def retrieve(self, keys: list[bytes], first: int) -> int:
        slots = [self._slots[key] for key in keys]
        return self._transfer(self._engine.batch_transfer_sync_read, self._to, first, slots)

    def forget(self, keys: list[bytes]) -> None:
        self._free = [*(self._slots.pop(key) for key in keys if key in self._slots), *self._free]

    def close(self) -> None:
        return

    def _transfer(self, call: Any, memory: int, first: int, slots: list[int]) -> int:
        size, base = self._bytes, self._target["address"]
        start = memory + first * size
        here = list(range(start, start + len(slots) * size, size))
        there = [base + slot * size for slot in slots]
        _check(call(self._target["session"], here, there, self._sizes[: len(slots)]), "batch transfer")
        return len(slots)


def Adapter(options: dict[str, Any]) -> Any:
    return {"engine": Engine, "offload": Offload}.get(options["client"], Store)(options)
