"""Redis, in memory only: nothing persisted, one thread of the server as its documentation advises below four cores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from emulator.peers.catalogue import ENTRESOL_SHM, ENTRESOL_TCP, LOOKUP, SAME_HOST, STAGED, TCP, Family, Peer, Sizes
from emulator.peers.turns import Turn

FAMILY: Final = Family("redis", requirements=("numpy", "redis==8.1.0", "hiredis==3.5.0"), debian=("redis-server",))
_WINDOW_BYTES: Final = 1 << 20
_SERVER: Final = "redis-server --save '' --appendonly no (not persisted), io-threads 1"


class Server(NamedTuple):
    port: int
    path: Path


def start_server(turn: Turn) -> Server:
    """Redis on a port of its own and a Unix socket in the turn's directory. Raises PeerError, LowerLayerError."""
    server = Server(turn.free_port(), turn.dir / "redis.sock")
    command = [
        "redis-server", "--port", str(server.port), "--bind", "127.0.0.1", "--unixsocket", str(server.path),
        "--save", "", "--appendonly", "no", "--dir", str(turn.dir), "--lazyfree-lazy-user-del", "yes",
    ]  # fmt: skip
    turn.wait_for(server.path, turn.server(command))
    return server


def _start(client: str, unix: bool) -> Callable[[Turn, Sizes], dict[str, Any]]:
    def start(turn: Turn, _sizes: Sizes) -> dict[str, Any]:
        server = start_server(turn)
        settings = {"client": client, "huge": True, "window_bytes": _WINDOW_BYTES}
        return {**settings, **({"unix": str(server.path)} if unix else {"port": server.port})}

    return start


def _peer(name: str, client: str, unix: bool, settings: str) -> Peer:
    return Peer(
        name=name,
        family=FAMILY,
        reach=SAME_HOST if unix else TCP,
        adapter="redis_client",
        start=_start(client, unix),
        settings=f"{_SERVER}; {settings}",
        operations=STAGED | {LOOKUP},
        against=(ENTRESOL_SHM if unix else ENTRESOL_TCP,),
    )


_OFFICIAL: Final = (
    "redis-py with hiredis, socket_read_size 1 MiB, socket_timeout None: a pipeline of SET (MSET is slower), "
    "pipelines of GET for 1 MiB at a time and a copy into place, a pipeline of EXISTS"
)
_RAW: Final = (
    "own client: a batch of SET or EXISTS in one write; GET for 1 MiB at a time, the next asked for before this one is "
    "received, values received straight into place"
)
PEERS: Final = (
    _peer("Redis, redis-py, TCP", "redis-py", False, _OFFICIAL),
    _peer("Redis, redis-py, Unix socket", "redis-py", True, _OFFICIAL),
    _peer("Redis, raw pipeline, TCP", "raw", False, _RAW),
    _peer("Redis, raw pipeline, Unix socket", "raw", True, _RAW),
)
