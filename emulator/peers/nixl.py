"""NIXL: its UCX plug-in between two processes and its POSIX plug-in to a file. It has no keys and no existence check
on memory, so LOOKUP is not measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from emulator.peers.catalogue import (
    ENTRESOL_HUGE,
    ENTRESOL_SHM,
    ENTRESOL_TCP,
    ON_FLASH,
    SAME_HOST,
    STAGED,
    TCP,
    Family,
    Peer,
    Sizes,
)
from emulator.peers.turns import Turn

FAMILY: Final = Family("nixl", requirements=("numpy",), no_deps=("nixl==1.5.1", "nixl-cu12==1.5.1"))
_CALLS: Final = "prep_xfer_dlist once, make_prepped_xfer and transfer a batch, target memory in no order"


def _ucx(huge: bool, environment: Mapping[str, str]) -> Callable[[Turn, Sizes], dict[str, Any]]:
    def start(turn: Turn, _sizes: Sizes) -> dict[str, Any]:
        options = {"backend": "UCX", "huge": huge, "progress_thread": False}
        target = turn.serve("nixl_client", options, environment)
        return {**options, "target": target}

    return start


def _posix(turn: Turn, _sizes: Sizes) -> dict[str, Any]:
    return {
        "backend": "POSIX",
        "parameters": {"use_uring": "true", "use_aio": "false"},
        "directory": str(turn.flash_dir),
        "huge": True,
        "progress_thread": False,
    }


def _ucx_peer(name: str, reach: str, huge: bool, environment: Mapping[str, str], settings: str) -> Peer:
    return Peer(
        name=name,
        family=FAMILY,
        reach=reach,
        adapter="nixl_client",
        start=_ucx(huge, environment),
        settings=f"{settings}; {_CALLS}",
        operations=STAGED,
        environment=environment,
        against=(ENTRESOL_TCP,) if reach == TCP else (ENTRESOL_HUGE, ENTRESOL_SHM) if huge else (ENTRESOL_SHM,),
    )


_TLS_TCP: Final = {"UCX_TLS": "tcp", "UCX_TCP_TX_SEG_SIZE": "2m", "UCX_TCP_RX_SEG_SIZE": "2m"}
PEERS: Final = (
    _ucx_peer("NIXL, UCX same host, 4 KiB pages", SAME_HOST, False, {}, "UCX as shipped (picks cma and shared memory)"),
    _ucx_peer("NIXL, UCX same host, huge pages", SAME_HOST, True, {}, "the same, memory on transparent huge pages"),
    _ucx_peer(
        "NIXL, UCX over TCP",
        TCP,
        True,
        _TLS_TCP,
        "segments of 2 MiB (3 times as fast to read as its 8 KiB), transparent huge pages",
    ),
    Peer(
        name="NIXL, POSIX to a file",
        family=FAMILY,
        reach=SAME_HOST,
        adapter="nixl_client",
        start=_posix,
        settings=f"use_uring, file opened with O_DIRECT, fsync untimed; {_CALLS}",
        operations=ON_FLASH,
        against=(ENTRESOL_SHM,),
    ),
)
