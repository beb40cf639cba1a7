"""Mooncake: its store, with the process that owns the memory apart from the client, and its transfer engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from emulator.peers.catalogue import (
    ENTRESOL_SHM,
    ENTRESOL_TCP,
    FLASH_READ,
    LOOKUP,
    SAME_HOST,
    STAGED,
    TCP,
    Family,
    Peer,
    Sizes,
)
from emulator.peers.turns import Turn

FAMILY: Final = Family(
    "mooncake",
    requirements=("numpy", "mooncake-transfer-engine-non-cuda==0.3.13.post1"),
    debian=("libibverbs1", "librdmacm1", "libnuma1", "liburing2"),
)
_SEGMENT: Final = "2 GB"
_ENVIRONMENT: Final = {"MC_TCP_SLICE_SIZE": str(1 << 20)}
_SHORT_LEASE_MS: Final = 100
_OFFLOAD: Final = {
    **_ENVIRONMENT,
    "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR": "bucket_storage_backend",
    "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
    "MOONCAKE_OFFLOAD_USE_URING": "true",
    "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": "16",
    "MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES": str(16 << 20),
    "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES": str(8 << 30),
}
_SLACK_BYTES: Final = 192 << 20
_MAIN: Final = "mooncake_master, mooncake_client owning 2 GB, P2PHANDSHAKE"
_CALLS: Final = "register_buffer, batch_put_from, batch_get_into, batch_is_exist"


def _store(client: str) -> Callable[[Turn, Sizes], dict[str, Any]]:
    def start(turn: Turn, sizes: Sizes) -> dict[str, Any]:
        master, metrics, port = turn.free_port(), turn.free_port(), turn.free_port()
        bin_dir = Path(turn.python).parent
        command = [f"{bin_dir}/mooncake_master", f"--rpc_port={master}", f"--metrics_port={metrics}"]
        pid = turn.server([*command, "--enable_metric_reporting=false"], _ENVIRONMENT)
        turn.wait_for(master, pid)
        pid = turn.server(
            [
                f"{bin_dir}/mooncake_client", f"--master_server_address=127.0.0.1:{master}", "--host=127.0.0.1",
                "--protocol=tcp", f"--port={port}", f"--global_segment_size={_SEGMENT}",
                "--metadata_server=P2PHANDSHAKE", "--threads=2",
            ],
            _ENVIRONMENT,
        )  # fmt: skip
        turn.wait_for(port, pid)
        return {
            "client": client,
            "master_port": master,
            "client_port": port,
            "huge": True,
            "pool_bytes": 3 * 2 * sizes.blocks * sizes.block_bytes + _SLACK_BYTES,
        }

    return start


def _offload(turn: Turn, sizes: Sizes) -> dict[str, Any]:
    master = turn.free_port()
    command = [f"{turn.python.parent}/mooncake_master", f"--rpc_port={master}", f"--metrics_port={turn.free_port()}"]
    options = ["--enable_metric_reporting=false", "--enable_offload=true", f"--default_kv_lease_ttl={_SHORT_LEASE_MS}"]
    turn.wait_for(master, turn.server([*command, *options], _OFFLOAD))
    directory = turn.flash_dir / "offload"
    directory.mkdir()
    return {
        "client": "offload",
        "master_port": master,
        "segment_bytes": 2 * sizes.blocks * sizes.block_bytes + _SLACK_BYTES,
        "directory": str(directory),
        "huge": True,
    }


def _engine(turn: Turn, _sizes: Sizes) -> dict[str, Any]:
    return {"client": "engine", "huge": True, "target": turn.serve("mooncake_client", {"huge": True}, _ENVIRONMENT)}


def _peer(name: str, reach: str, start: Callable[[Turn, Sizes], dict[str, Any]], settings: str, lookup: bool) -> Peer:
    return Peer(
        name=name,
        family=FAMILY,
        reach=reach,
        adapter="mooncake_client",
        start=start,
        settings=settings,
        operations=STAGED | {LOOKUP} if lookup else STAGED,
        environment=_ENVIRONMENT,
        against=(ENTRESOL_TCP if reach == TCP else ENTRESOL_SHM,),
    )


PEERS: Final = (
    _peer(
        "Mooncake Store, same host",
        SAME_HOST,
        _store("dummy"),
        f"{_MAIN}; setup_dummy, alloc_from_mem_pool: memory shared with that process; {_CALLS}",
        True,
    ),
    _peer(
        "Mooncake Store, TCP",
        TCP,
        _store("embedded"),
        f"{_MAIN}; setup with protocol tcp and no segment of its own; {_CALLS}",
        True,
    ),
    _peer(
        "Mooncake Transfer Engine, TCP",
        TCP,
        _engine,
        "two engines, P2PHANDSHAKE; batch_transfer_sync_write and _read, target memory in no order",
        False,
    ),
    Peer(
        name="Mooncake Store, offload to flash",
        family=FAMILY,
        reach=SAME_HOST,
        adapter="mooncake_client",
        start=_offload,
        settings="mooncake_master --enable_offload, client with segment and flash tier in one process; buckets of "
        "16 keys, io_uring; read after batch_replica_clear of the replicas in memory, page cache dropped",
        operations=frozenset({FLASH_READ}),
        environment=_OFFLOAD,
        against=(ENTRESOL_SHM,),
    ),
)
