"""LMCache: its native RESP connector against Redis, and its raw-block tier on a file.

Both are called as its storage tiers call them, without an engine. MemoryObj are made over the caller's memory.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import select
from typing import Any

_DEADLINE_MS = 60_000


def _version() -> str:
    return f"lmcache {importlib.metadata.version('lmcache')}, torch {importlib.metadata.version('torch')}"


class Resp:
    """The C++ client of its Redis tier: worker threads with a connection each, completions by an event descriptor."""

    def __init__(self, options: dict[str, Any]) -> None:
        from lmcache.lmcache_redis import LMCacheRedisClient

        self._client = LMCacheRedisClient("127.0.0.1", options["port"], options["workers"])
        self._event = select.poll()
        self._event.register(self._client.event_fd(), select.POLLIN)

    def about(self) -> dict[str, str]:
        return {"version": _version()}

    def prepare(self, block_bytes: int, _blocks: int, source: Any, destination: Any) -> None:
        self._bytes, self._source, self._to = block_bytes, source.data, destination.data

    def store(self, keys: list[bytes], first: int) -> int:
        names = [key.decode() for key in keys]
        self._finish(self._client.submit_batch_set(names, self._places(self._source, first, len(keys))))
        return len(keys)

    def retrieve(self, keys: list[bytes], first: int) -> int:
        names = [key.decode() for key in keys]
        self._finish(self._client.submit_batch_get(names, self._places(self._to, first, len(keys))))
        return len(keys)

    def names(self, keys: list[bytes]) -> list[str]:
        return [key.decode() for key in keys]

    def lookup(self, names: list[str]) -> int:
        found = self._finish(self._client.submit_batch_exists(names))
        return sum(map(bool, found))

    def forget(self, keys: list[bytes]) -> None:
        self._finish(self._client.submit_batch_delete([key.decode() for key in keys]))

    def close(self) -> None:
        self._client.close()

    def _places(self, memory: Any, first: int, count: int) -> list[Any]:
        size = self._bytes
        return [memory[at : at + size] for at in range(first * size, (first + count) * size, size)]

    def _finish(self, wanted: int) -> Any:
        """Wait for one future; its results."""
        while True:
            if not self._event.poll(_DEADLINE_MS):
                raise TimeoutError("no completion")
            for future, ok, error, results in self._client.drain_completions():
                if future == wanted:
                    if not ok:
                        raise RuntimeError(error)
                    return results


class RawBlock:
    """The engine of its raw-block tier, in this process: io_uring, O_DIRECT, its zero-copy path."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._path = os.path.join(options["directory"], "raw-block")
        self._core: Any = None

    def about(self) -> dict[str, str]:
        name = "lmcache-rust-raw-block-io"
        return {"version": f"{_version()}, {name} {importlib.metadata.version(name)}"}

    def prepare(self, block_bytes: int, blocks: int, source: Any, destination: Any) -> None:
        from lmcache.v1.storage_backend.raw_block import RawBlockCore, RawBlockCoreConfig

        self.close()
        header, meta = 4096, 8 << 20
        capacity = meta + (block_bytes + header) * 3 * blocks
        with open(self._path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, capacity)
        config = RawBlockCoreConfig(
            device_path=self._path,
            capacity_bytes=capacity,
            block_align=4096,
            header_bytes=header,
            slot_bytes=block_bytes + header,
            use_odirect=True,
            enable_zero_copy=True,
            meta_total_bytes=meta,
            meta_magic=b"LMCBLK01",
            meta_version=1,
            meta_checkpoint_interval_sec=3600,
            meta_idle_quiet_ms=1000,
            meta_enable_periodic=False,
            meta_verify_on_load=False,
            load_checkpoint_on_init=False,
            io_engine="io_uring",
        )
        self._core = RawBlockCore(config, key_namespace="object_key")
        self._source = [_memory_object(source, place, block_bytes) for place in range(blocks)]
        self._to = [_memory_object(destination, place, block_bytes) for place in range(blocks)]

    def flash_store(self, keys: list[bytes], first: int) -> int:
        from lmcache.v1.storage_backend.raw_block import RawBlockKeySpec

        specs = [RawBlockKeySpec(_name(key), int(hashlib.sha256(key).hexdigest()[:15], 16)) for key in keys]
        return sum(self._core.put_many(specs, self._source[first : first + len(keys)]).results)

    def flash_ready(self, _keys: list[bytes]) -> None:
        """O_DIRECT: nothing is in the page cache."""

    def flash_read(self, keys: list[bytes], first: int) -> int:
        return sum(self._core.load_many_into([_name(key) for key in keys], self._to[first : first + len(keys)]))

    def forget(self, keys: list[bytes]) -> None:
        self._core.delete_many([_name(key) for key in keys])

    def close(self) -> None:
        if self._core is not None:
            self._core.close()
            self._core = None


def _name(key: bytes) -> str:
    return f"model@0@0@{key.decode()}"


def _memory_object(memory: Any, place: int, size: int) -> Any:
    """A MemoryObj over one block of the driver's memory."""
    import torch
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    tensor = torch.from_numpy(memory[place * size : (place + 1) * size])
    shape = torch.Size([size])
    metadata = MemoryObjMetadata(shape, torch.uint8, tensor.data_ptr(), size, 1, fmt=MemoryFormat.KV_2LTD)
    return TensorMemoryObj(tensor, metadata, None)


def Adapter(options: dict[str, Any]) -> Any:
    return {"resp": Resp, "raw-block": RawBlock}[options["client"]](options)
