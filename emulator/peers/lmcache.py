"""LMCache: storage tiers of its own, called without an engine. Its distribution asks for CUDA packages that are not
used here, so what is used is named instead."""

from __future__ import annotations

from typing import Any, Final

from emulator.peers.catalogue import (
    ENTRESOL_SHM,
    ENTRESOL_TCP,
    LOOKUP,
    ON_FLASH,
    SAME_HOST,
    STAGED,
    TCP,
    Family,
    Peer,
    Sizes,
)
from emulator.peers.redis import start_server
from emulator.peers.turns import Turn

_USED: Final = (
    "torch==2.13.0 transformers numpy<=2.2.6 numba sortedcontainers pyyaml requests pyzmq msgspec fastapi uvicorn "
    "httptools prometheus_client psutil opentelemetry-api opentelemetry-sdk opentelemetry-exporter-prometheus blake3 "
    "httpx aiofile aiofiles aiohttp cachetools py-cpuinfo cryptography"
)
FAMILY: Final = Family(
    "lmcache",
    requirements=tuple(_USED.split()),
    no_deps=("lmcache==0.5.6", "lmcache-rust-raw-block-io==0.5.7rc2"),
    debian=("redis-server",),
)
_WORKERS: Final = 8
_CHUNK_TOKENS: Final = 16
_QUIET: Final = {"LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}

_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1"}
"""PyTorch copies with all cores otherwise, which takes several times the processor time here and is no faster."""


def _resp(turn: Turn, _sizes: Sizes) -> dict[str, Any]:
    return {"client": "resp", "port": start_server(turn).port, "workers": _WORKERS}


def _server(turn: Turn, _sizes: Sizes) -> dict[str, Any]:
    port = turn.free_port()
    options = {
        "supported-transfer-mode": "engine_driven",
        "l1-size-gb": 3,
        "eviction-policy": "LRU",
        "port": port,
        "http-port": turn.free_port(),
        "prometheus-port": turn.free_port(),
        "chunk-size": _CHUNK_TOKENS,
        "shm-name": f"entresol-{port}",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [f"{turn.python.parent}/lmcache", "server", "--no-l1-use-lazy", *words]
    turn.wait_for(port, turn.server(command, _QUIET))
    return {"port": port, "chunk_tokens": _CHUNK_TOKENS, "huge": True}


def _raw_block(turn: Turn, _sizes: Sizes) -> dict[str, Any]:
    return {"client": "raw-block", "directory": str(turn.flash_dir), "huge": True}


PEERS: Final = (
    Peer(
        name="LMCache, server, same host",
        family=FAMILY,
        reach=SAME_HOST,
        adapter="lmcache_engine",
        start=_server,
        settings="engine-driven transfer by shared memory, a chunk a block; a retrieve includes its look-up",
        environment={**_QUIET, **_ONE_THREAD},
        against=(ENTRESOL_SHM,),
    ),
    Peer(
        name="LMCache, RESP connector to Redis",
        family=FAMILY,
        reach=TCP,
        adapter="lmcache_client",
        start=_resp,
        settings=f"LMCacheRedisClient, {_WORKERS} workers (its default): submit_batch_set, _get, _exists",
        operations=STAGED | {LOOKUP},
        against=(ENTRESOL_TCP,),
    ),
    Peer(
        name="LMCache, raw-block tier",
        family=FAMILY,
        reach=SAME_HOST,
        adapter="lmcache_client",
        start=_raw_block,
        settings="RawBlockCore on a file: io_uring, O_DIRECT, zero copy; put_many, load_many_into",
        operations=ON_FLASH,
        against=(ENTRESOL_SHM,),
    ),
)
