"""Runs in a peer's own environment, on the standard library and numpy: `python -I driver.py client|serve ADAPTER JSON`.

As a client it answers one JSON line on standard output for each on standard input: `prepare`, `store`, `retrieve`,
`lookup`, `flash_store`, `flash_read`, `forget`, `close`. It owns the buffers, makes and compares the contents outside
the timed calls, and times nothing but the adapter's calls. What a peer prints goes to standard error. As a server it
says one line when ready and ends when its input closes. `emulator.peers.turns` is at the other end.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import mmap
import os
import sys
import time
import traceback
from typing import IO, Any

import numpy as np

_PAGE = 2 << 20
_CPU_CLOCK_SCHED = 2
"""A process's clock is named by its pid and this kind: clock_getcpuclockid(3), as Linux does it."""
_CHUNK_WORDS = 32768
_DAMAGE_STEP_WORDS = 512
_REASONS_MAX = 5


class Pattern:
    """Contents that the key determines: every 8-byte word tells the block and its place in it."""

    def __init__(self, block_bytes_max: int) -> None:
        words = block_bytes_max // 8
        self._tape = np.random.Generator(np.random.PCG64(0)).integers(0, 1 << 64, words, dtype=np.uint64)

    def fill(self, key: bytes, words: Any) -> None:
        np.bitwise_xor(self._tape[: len(words)], _word(key), out=words)

    def first_mismatch(self, key: bytes, words: Any) -> int | None:
        """Offset in bytes of the first word that differs, or None."""
        for start in range(0, len(words), _CHUNK_WORDS):
            part = words[start : start + _CHUNK_WORDS] ^ _word(key)
            tape = self._tape[start : start + len(part)]
            if not np.array_equal(part, tape):
                return (start + int(np.argmax(part != tape))) * 8
        return None


def _word(key: bytes) -> Any:
    return np.uint64(int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little"))


def allocate(length_bytes: int, huge: bool) -> Any:
    """Touched memory from a 2 MiB boundary on, of transparent huge pages if `huge`: a numpy array of bytes."""
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapping = mmap.mmap(-1, length_bytes + _PAGE, flags=anonymous)
    mapping.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    whole = np.frombuffer(mapping, np.uint8)
    start = -int(whole.ctypes.data) % _PAGE
    memory = whole[start : start + length_bytes]
    memory[:] = 0
    return memory


def cpu_s(pids: list[int]) -> float:
    """Seconds on a core of all threads that processes `pids` have had, exact to the moment. What has ended counts
    nothing."""
    total_s = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            total_s += time.clock_gettime(~pid << 3 | _CPU_CLOCK_SCHED)
    return total_s


class Client:
    """The buffers of one adapter, and what is asked of it."""

    def __init__(self, adapter: Any, options: dict[str, Any]) -> None:
        self._adapter = adapter
        self._huge = bool(options.get("huge", False))
        self._server_pids: list[int] = options.get("server_pids", [])
        self._pattern = Pattern(int(options.get("block_bytes_max", 4 << 20)))
        self._block_bytes = 0
        self._source: Any = None
        self._destination: Any = None

    def prepare(self, block_bytes: int, blocks: int) -> dict[str, Any]:
        """Buffers for `blocks` blocks, those of the adapter where it brings its own."""
        own = getattr(self._adapter, "allocate", None)
        length = block_bytes * blocks
        self._block_bytes = block_bytes
        self._source, self._destination = (own(length) if own else allocate(length, self._huge) for _ in range(2))
        self._adapter.prepare(block_bytes, blocks, self._source, self._destination)
        return {}

    def store(self, keys: list[str], batch: int) -> dict[str, Any]:
        return self._write(self._adapter.store, keys, batch)

    def retrieve(self, keys: list[str], batch: int) -> dict[str, Any]:
        return self._read(self._adapter.retrieve, keys, batch)

    def flash_store(self, keys: list[str], batch: int) -> dict[str, Any]:
        """Store until on flash; `flash_ready`, untimed, puts the blocks where `flash_read` finds them cold."""
        answer = self._write(self._adapter.flash_store, keys, batch)
        self._adapter.flash_ready([key.encode() for key in keys])
        return answer

    def flash_read(self, keys: list[str], batch: int) -> dict[str, Any]:
        return self._read(self._adapter.flash_read, keys, batch)

    def lookup(self, keys: list[str], calls: int) -> dict[str, Any]:
        """Presence of stored keys, all in one call; every call is checked to have found all of them. `names` of an
        adapter gives keys the form that its peer takes as it is."""
        names_of = getattr(self._adapter, "names", list)
        names = names_of([key.encode() for key in keys])
        found: list[int] = []

        def one(_part: list[bytes], _first: int) -> int:
            found.append(self._adapter.lookup(names))
            return found[-1]

        answer = self._timed(one, [[b""] * len(keys)] * calls)
        answer["wrong"] = [f"{count} of {len(keys)} present keys found" for count in found if count != len(keys)]
        if self._adapter.lookup(names_of([key.encode()[::-1] for key in keys[:1]])):
            answer["wrong"].append("a key that was never stored was found")
        answer["wrong"] = answer["wrong"][:_REASONS_MAX]
        return answer

    def forget(self, keys: list[str]) -> dict[str, Any]:
        self._adapter.forget([key.encode() for key in keys])
        return {}

    def _write(self, call: Any, keys: list[str], batch: int) -> dict[str, Any]:
        names = [key.encode() for key in keys]
        for place, key in enumerate(names):
            self._pattern.fill(key, self._words(self._source, place))
        answer = self._timed(call, _cut(names, batch))
        settle = getattr(self._adapter, "settle", None)
        if settle:  # what goes on in the background after the answer must not run into what is timed next
            settle(names)
        return answer

    def _read(self, call: Any, keys: list[str], batch: int) -> dict[str, Any]:
        names = [key.encode() for key in keys]
        self._destination.view(np.uint64)[::_DAMAGE_STEP_WORDS] ^= np.uint64(0x5A5A5A5A5A5A5A5A)
        answer = self._timed(call, _cut(names, batch))
        wrong = []
        for place, key in enumerate(names):
            offset = self._pattern.first_mismatch(key, self._words(self._destination, place))
            if offset is not None:
                wrong.append(f"block {place} of {self._block_bytes} bytes differs at byte {offset}")
        if len(wrong) <= answer["failed"]:  # a block that did not come, and was said not to, is not a wrong one
            wrong = []
        answer["wrong"] = ([f"{len(wrong)} blocks differ", *wrong[:_REASONS_MAX]]) if wrong else []
        return answer

    def _words(self, memory: Any, place: int) -> Any:
        return memory[place * self._block_bytes : (place + 1) * self._block_bytes].view(np.uint64)

    def _timed(self, call: Any, parts: list[list[bytes]]) -> dict[str, Any]:
        """Seconds of each call, and processor seconds of both sides over all of them. `call` gives how many of its
        blocks succeeded."""
        me = [os.getpid()]
        times: list[float] = []
        done, first = 0, 0
        client_s, server_s = cpu_s(me), cpu_s(self._server_pids)
        for part in parts:
            started = time.perf_counter()
            count = call(part, first)
            times.append(time.perf_counter() - started)
            done += count
            first += len(part)
        client_s, server_s = cpu_s(me) - client_s, cpu_s(self._server_pids) - server_s
        return {
            "seconds": times,
            "blocks": done,
            "failed": first - done,
            "client_cpu_s": client_s,
            "server_cpu_s": server_s,
        }


def _cut(names: list[bytes], batch: int) -> list[list[bytes]]:
    return [names[start : start + batch] for start in range(0, len(names), batch)]


def run_client(adapter_module: Any, options: dict[str, Any], requests: Any, answers: IO[str]) -> None:
    """One answer a line, `{"ok": ...}` or `{"error": text}`; ends after `close` or the end of the input."""
    adapter = None
    client = None
    for line in requests:
        request = json.loads(line)
        operation = request.pop("op")
        try:
            if operation == "open":
                adapter = adapter_module.Adapter(options)
                client = Client(adapter, options)
                answer = {"about": adapter.about()}
            elif operation == "close":
                if adapter is not None:
                    adapter.close()
                answer = {}
            else:
                answer = getattr(client, operation)(**request)
            text = json.dumps({"ok": answer})
        except Exception as error:  # noqa: BLE001 -- whatever a peer raises is its answer, told whole
            traceback.print_exc()
            text = json.dumps({"error": f"{type(error).__name__}: {error}"})
        answers.write(text + "\n")
        answers.flush()
        if operation == "close":
            return


def run_server(adapter_module: Any, options: dict[str, Any], requests: Any, answers: IO[str]) -> None:
    """`adapter.serve(options, allocate)` gives what clients need to know, as plain values, and what must live while
    it serves in the background: until the input ends."""
    kept = None
    try:
        told, kept = adapter_module.serve(options, allocate)
        facts = {"ok": told}
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        facts = {"error": f"{type(error).__name__}: {error}"}
    answers.write(json.dumps(facts) + "\n")
    answers.flush()
    for _line in requests:
        continue
    del kept


def load_adapter(path: str) -> Any:
    """The module in the file `path`, whatever its name: nothing of this project is on the path of imports."""
    spec = importlib.util.spec_from_file_location("peer_adapter", path)
    if spec is None or spec.loader is None:
        raise ImportError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(arguments: list[str]) -> None:
    role, path, text = arguments
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    options = json.loads(text)
    run = {"client": run_client, "serve": run_server}[role]
    try:
        module = load_adapter(path)
    except Exception as error:  # noqa: BLE001 -- a peer that does not load says so in its first answer
        traceback.print_exc()
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        answers.flush()
        sys.exit(1)
    run(module, options, sys.stdin, answers)
    os._exit(0)  # threads of a peer must not hold the process up


if __name__ == "__main__":
    main(sys.argv[1:])
