"""An adapter for tests, loaded by path by the driver like a real peer's: a store in the memory of the client itself.

`options["fault"]` says how it is broken.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any


class Adapter:
    def __init__(self, options: dict[str, Any]) -> None:
        self._fault = options.get("fault", "")
        self._values: dict[bytes, bytes] = {}
        print("what a peer prints must not be taken for an answer")
        if self._fault == "chatter":
            os.write(options["answers"], b"ready\n")
        if self._fault == "open":
            raise RuntimeError("no such device")

    def about(self) -> dict[str, str]:
        return {"version": "1.0"}

    def prepare(self, block_bytes: int, _blocks: int, source: Any, destination: Any) -> None:
        self._bytes, self._source, self._to = block_bytes, source.data, destination.data

    def store(self, keys: list[bytes], first: int) -> int:
        for number, key in enumerate(keys, first):
            self._values[key] = bytes(self._source[number * self._bytes : (number + 1) * self._bytes])
        return len(keys)

    def retrieve(self, keys: list[bytes], first: int) -> int:
        if self._fault == "hang":
            signal.pause()
        if self._fault == "die":
            print("out of cheese", file=sys.stderr, flush=True)
            os._exit(3)
        if self._fault == "miss":
            return 0
        for number, key in enumerate(keys, first):
            value = bytearray(self._values[key])
            if self._fault == "flip":
                value[1000] ^= 1
            if self._fault != "idle":
                self._to[number * self._bytes : (number + 1) * self._bytes] = value
        return len(keys)

    flash_store = store
    flash_read = retrieve

    def flash_ready(self, keys: list[bytes]) -> None:
        if not all(key in self._values for key in keys):
            raise KeyError("not stored")

    def lookup(self, keys: list[bytes]) -> int:
        return len(keys) if self._fault == "yes" else sum(key in self._values for key in keys)

    def forget(self, keys: list[bytes]) -> None:
        for key in keys:
            del self._values[key]

    def close(self) -> None:
        self._values.clear()
