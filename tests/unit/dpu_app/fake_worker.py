"""A region worker without a region: speaks the worker channel, keeps a uuid in its file, and misbehaves on request.

Started as the real one is. The region's flash options say how to misbehave: ``fail=user`` or ``fail=lower`` with
``message``, ``crash=yes`` (once it was told to serve), ``hold=N`` (leases reported), ``deaf=METHOD`` (no answer).
What it was told is appended to PATH.log, one JSON message a line.
"""

from __future__ import annotations

import json
import os
import select
import sys
from typing import Any

from common.errors import EntresolError, LowerLayerError, UserError
from dpu_app.config import WorkerConfig
from dpu_app.regions.superblock import MAGIC
from dpu_app.worker_channel import ChannelClosedError, WorkerEnd, die_with_parent


def open_region(config: WorkerConfig) -> bytes:
    """The uuid in the file, made where there is none or format is forced."""
    settings = config.region
    kind = settings.flash.options.get("fail")
    if kind == "user":
        raise UserError(settings.flash.options.get("message", "it cannot be opened"))
    if kind == "lower":
        raise LowerLayerError("open", 5)
    if settings.format == "force" or not settings.path.exists():
        settings.path.write_bytes((MAGIC + os.urandom(16)).ljust(4096, b"\0"))
    return settings.path.read_bytes()[len(MAGIC) : len(MAGIC) + 16]


def serve(channel: WorkerEnd, config: WorkerConfig) -> None:
    options = config.region.flash.options
    log = config.region.path.with_suffix(".log")
    uuid = open_region(config)
    channel.event(
        "ready",
        address=config.fabric.listen,
        uuid=uuid.hex(),
        slot_bytes=config.region.slot_bytes,
        slots=64,
        capacity_bytes=64 * config.region.slot_bytes,
        generation=1,
        recovered=0,
        recovery_s=0.0,
    )
    if options.get("crash"):
        os._exit(9)
    while True:
        select.select([channel], [], [])
        for message in channel.recv():
            with log.open("a") as file:
                file.write(json.dumps(message) + "\n")
            if options.get("deaf") == message["method"]:
                continue
            channel.reply(message["id"], answer(message, options))
            if message["method"] == "session_open" and message["params"]["tenant"] == "lossy":
                channel.event("connection_lost", session_id=message["params"]["session_id"], reason="reset")
            if message["method"] == "stop":
                return


def answer(message: dict[str, Any], options: dict[str, str]) -> dict[str, Any]:
    if message["method"] == "status":
        return {"region": {}, "stats": {"LEASES": int(options.get("hold", "0")), "PINS": 0, "SLOTS": 64}}
    if message["method"] == "pauses":
        longest = {"duration_ns": 9, "waited_ns": 4, "ago_ns": 5, "parts_ns": {"gc": 9}}
        return {
            "bounds_ns": [1000, 2000],
            "turns": [1, 2, 3],
            "own": [3, 2, 1],
            "parts": {"gc": [0, 0, 1]},
            "total_ns": {"gc": 9},
            "longest": [longest],
        }
    return {}


def main() -> None:
    arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    channel = WorkerEnd.from_fd(int(arguments["--channel-fd"]))
    die_with_parent(int(arguments["--parent-pid"]))
    select.select([channel], [], [])
    config = WorkerConfig.from_dict(channel.recv()[0]["config"])
    try:
        serve(channel, config)
    except EntresolError as error:
        if not isinstance(error, ChannelClosedError):
            channel.failed(error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
