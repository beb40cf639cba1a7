"""LMCache's server in the place of an engine's worker: its engine-driven transfer context over shared memory.

LMCache names KV by token sequence: a batch of blocks is one sequence with a chunk of tokens for each block, and a
chunk's KV, of one layer, is the block. A retrieve needs a look-up before it, which takes the locks.
"""

from __future__ import annotations

import importlib.metadata
import time
import uuid
from typing import Any

_TIMEOUT_S = 30.0
_BF16_BYTES = 2


class Adapter:
    def __init__(self, options: dict[str, Any]) -> None:
        import zmq
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

        self._chunk_tokens = options["chunk_tokens"]
        self._context = zmq.Context()
        self._client = RequestClientFactory.create(f"tcp://127.0.0.1:{options['port']}", context=self._context)
        self._transfer: Any = None

    def about(self) -> dict[str, str]:
        return {"version": ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("lmcache", "torch"))}

    def prepare(self, block_bytes: int, blocks: int, source: Any, destination: Any) -> None:
        import torch
        from lmcache.v1.multiprocess.transfer_context.worker_transfer import EngineDrivenTransferContext

        self._close_transfer()
        hidden = block_bytes // self._chunk_tokens // _BF16_BYTES
        self._model = f"model-{block_bytes}"
        self._source, self._to = (
            {"model.layers.0": torch.from_numpy(memory).view(torch.bfloat16).view(blocks, self._chunk_tokens, hidden)}
            for memory in (source, destination)
        )
        self._transfer = EngineDrivenTransferContext(uuid.uuid4().int & ((1 << 63) - 1), self._client)
        self._transfer.register(self._source, self._model, 1, 1, _TIMEOUT_S)
        kind = type(self._transfer.engine_driven_context).__name__
        if not kind.endswith("Shm"):
            raise RuntimeError(f"the server gave no shared memory but {kind}")

    def store(self, keys: list[bytes], first: int) -> int:
        request = uuid.uuid4().hex
        blocks = [list(range(first, first + len(keys)))]
        done = self._transfer.submit_store(request, self._key(keys, request, 0), self._source, blocks, None, 1)
        return len(keys) if done.result(timeout=_TIMEOUT_S) else 0

    def retrieve(self, keys: list[bytes], first: int) -> int:
        request = uuid.uuid4().hex
        self._client.lookup(self._key(keys, request, None), 1).result(timeout=_TIMEOUT_S)
        deadline_s = time.monotonic() + _TIMEOUT_S
        while (found := self._client.query_prefetch_status(request).result(timeout=_TIMEOUT_S)) is None:
            if time.monotonic() > deadline_s:
                raise TimeoutError("no end of the look-up")
        blocks = [list(range(first, first + len(keys)))]
        if int(found) != len(keys):
            return 0
        done = self._transfer.submit_retrieve(request, self._key(keys, request, 0), self._to, blocks, None, 1)
        good = done.result(timeout=_TIMEOUT_S)
        self._client.end_session(request)
        return len(keys) if good else 0

    def forget(self, _keys: list[bytes]) -> None:
        """Nothing: its pool holds all that a turn stores."""

    def close(self) -> None:
        self._close_transfer()
        self._client.close()
        self._context.destroy(linger=0)

    def _close_transfer(self) -> None:
        if self._transfer is not None:
            self._transfer.unregister()
            self._transfer.close()
            self._transfer = None

    def _key(self, keys: list[bytes], request: str, worker: int | None) -> Any:
        from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

        tokens: list[int] = []
        for key in keys:
            halves = [int(key[:7], 16), int(key[7:14], 16)]
            tokens += halves * (self._chunk_tokens // 2)
        return IPCCacheServerKey(
            model_name=self._model,
            world_size=1,
            num_kv_readers=1,
            worker_id=worker,
            token_ids=tuple(tokens),
            start=0,
            end=len(tokens),
            request_id=request,
        )
