"""How a flash device must behave, as checks that run on any of them: drivers in tests, a real drive in the field.

Free of any test framework: a check raises `ContractViolation`, and its first docstring line says what it holds.
It overwrites the flash it is given. Called by tests/contract and by anyone who writes a driver.
"""

from __future__ import annotations

import errno
import random
import select
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from doca_shims.api import FlashCompletion, FlashDevice, FlashOp, FlashRequest, Memory, ShimError

WAIT_S = 20.0
_NOT_BLOCKING_S = 1.0
_TAG_MAX = (1 << 64) - 1
_UNTOUCHED = 0xA5


class ContractViolation(Exception):
    """The device did not do what `doca_shims.api.FlashDevice` says."""


@dataclass(frozen=True)
class FlashUnderTest:
    """`open_device` opens one and the same flash each time, of at least 64 blocks; `allocate` gives memory."""

    open_device: Callable[[], FlashDevice]
    allocate: Callable[[int], Memory]


class _Session:
    """An open device with one registered memory, and the waiting that a caller with an event loop would do."""

    def __init__(self, target: FlashUnderTest, memory_blocks: int = 64) -> None:
        self.device = target.open_device()
        self.block_bytes = self.device.caps.block_bytes
        self.memory = target.allocate(max(1 << 20, memory_blocks * self.block_bytes))
        self.device.register_memory(self.memory)
        self._poller = select.poll()
        self._poller.register(self.device.fileno(), select.POLLIN)

    def __enter__(self) -> _Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.device.close()
        self.memory.close()

    def readable(self, timeout_s: float = 0.0) -> bool:
        return bool(self._poller.poll(timeout_s * 1000))

    def request(self, tag: int, op: FlashOp, block: int, memory_block: int = 0, blocks: int = 1) -> FlashRequest:
        address = self.memory.address + memory_block * self.block_bytes
        return FlashRequest(tag, op, block * self.block_bytes, address, blocks * self.block_bytes)

    def wait(self, count: int) -> list[FlashCompletion]:
        """Exactly `count` completions: fewer in time, or more, is a violation."""
        done: list[FlashCompletion] = []
        deadline_s = time.monotonic() + WAIT_S
        while len(done) < count:
            left_s = deadline_s - time.monotonic()
            _require(left_s > 0 and self.readable(left_s), f"{count - len(done)} completions did not come")
            done += self.device.poll()
        _require(len(done) == count, f"{len(done)} completions for {count} requests")
        return done

    def do(self, requests: Sequence[FlashRequest]) -> None:
        """Submit, wait, and require that each request is answered once and in full."""
        self.device.submit(requests)
        results = {completion.tag: completion.result for completion in self.wait(len(requests))}
        for request in requests:
            expected = request.length_bytes if request.op in (FlashOp.READ, FlashOp.WRITE) else 0
            _require(results.get(request.tag) == expected, f"{request} was answered {results.get(request.tag)}")

    def fill(self, data: bytes, memory_block: int = 0) -> None:
        start = memory_block * self.block_bytes
        self.memory.view[start : start + len(data)] = data

    def bytes_at(self, memory_block: int, blocks: int = 1) -> bytes:
        start = memory_block * self.block_bytes
        return bytes(self.memory.view[start : start + blocks * self.block_bytes])

    def refuse(self, requests: Sequence[FlashRequest], code: int, what: str) -> None:
        try:
            self.device.submit(requests)
        except ShimError as error:
            _require(error.errno == code, f"{what} was refused with errno {error.errno}, not {code}")
            return
        raise ContractViolation(f"{what} was accepted")


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ContractViolation(what)


def _pattern(seed: int, length_bytes: int) -> bytes:
    return random.Random(seed).randbytes(length_bytes)


def writes_read_back(target: FlashUnderTest) -> None:
    """What was written is read, whatever the number of blocks, and nothing beside it is touched."""
    with _Session(target) as session:
        for seed, blocks in enumerate((1, 2, 3, 8, 13)):
            data = _pattern(seed, blocks * session.block_bytes)
            session.fill(data)
            session.do([session.request(1, FlashOp.WRITE, 5, 0, blocks)])
            session.fill(bytes([_UNTOUCHED]) * (blocks + 2) * session.block_bytes, 20)
            session.do([session.request(2, FlashOp.READ, 5, 21, blocks)])
            _require(session.bytes_at(21, blocks) == data, f"{blocks} blocks read back differ")
            guard = bytes([_UNTOUCHED]) * session.block_bytes
            _require(session.bytes_at(20) == guard, "memory before the destination was written")
            _require(session.bytes_at(21 + blocks) == guard, "memory after the destination was written")


def misuse_is_refused(target: FlashUnderTest) -> None:
    """Misaligned, out of range or unregistered: EINVAL, and nothing of the batch is started."""
    with _Session(target) as session:
        device, block = session.device, session.block_bytes
        capacity, memory = device.caps.capacity_bytes, session.memory
        read = session.request(7, FlashOp.READ, 0)
        bad = {
            "a misaligned offset": read._replace(offset_bytes=1),
            "a misaligned length": read._replace(length_bytes=block - 1),
            "a misaligned address": read._replace(address=memory.address + 1),
            "no bytes": read._replace(length_bytes=0),
            "a negative length": read._replace(length_bytes=-block),
            "a negative offset": read._replace(offset_bytes=-block),
            "an offset at the end": read._replace(offset_bytes=capacity),
            "a range past the end": read._replace(offset_bytes=capacity - block, length_bytes=2 * block),
            "memory before the registered": read._replace(address=memory.address - block),
            "memory past the registered": read._replace(address=memory.address + memory.length_bytes),
            "address 0": read._replace(address=0),
            "a FLUSH with a range": FlashRequest(7, FlashOp.FLUSH, block, 0, block),
            "a tag of more than 64 bits": read._replace(tag=_TAG_MAX + 1),
        }
        if device.caps.max_io_bytes < capacity:
            bad["more than max_io_bytes"] = read._replace(length_bytes=device.caps.max_io_bytes + block)
        session.do([session.request(1, FlashOp.WRITE, 0, 1)])
        before = session.bytes_at(1)
        session.fill(_pattern(3, block))
        for what, request in bad.items():
            session.refuse([request], errno.EINVAL, what)
            session.refuse([session.request(8, FlashOp.WRITE, 0), request], errno.EINVAL, f"a batch with {what}")
        _require(not session.readable() and device.poll() == [], "a refused batch produced completions")
        session.do([session.request(9, FlashOp.READ, 0, 2)])
        _require(session.bytes_at(2) == before, "part of a refused batch was carried out")


def queue_depth_is_kept(target: FlashUnderTest) -> None:
    """Work up to queue_depth_max is taken; one more is EAGAIN and starts nothing; room returns with poll."""
    with _Session(target) as session:
        device = session.device
        depth = device.caps.queue_depth_max
        full = [session.request(tag, FlashOp.READ, tag % 8, tag % 8) for tag in range(depth)]
        session.refuse([*full, session.request(depth, FlashOp.READ, 0)], errno.EAGAIN, "a batch past the queue depth")
        _require(not session.readable() and device.poll() == [], "a refused batch produced completions")
        for start in range(0, depth, 16):
            device.submit(full[start : start + 16])
        session.refuse([session.request(depth, FlashOp.READ, 0)], errno.EAGAIN, "one more than the queue depth")
        tags = sorted(completion.tag for completion in session.wait(depth))
        _require(tags == list(range(depth)), "the tags that came back are not those that were accepted")
        session.do(full)


def tags_come_back_once(target: FlashUnderTest) -> None:
    """Many in flight, submitted in batches of every size: each tag is answered exactly once, in any order."""
    with _Session(target) as session:
        device = session.device
        source = random.Random(11)
        blocks = min(64, device.caps.capacity_bytes // session.block_bytes)
        contents = [_pattern(100 + block, session.block_bytes) for block in range(blocks)]
        for block, data in enumerate(contents):
            session.fill(data, block)
        window = max(1, min(16, device.caps.queue_depth_max))
        for first in range(0, blocks, window):
            batch = range(first, min(first + window, blocks))
            session.do([session.request(_TAG_MAX - block, FlashOp.WRITE, block, block) for block in batch])
        for _ in range(20):
            chosen = source.sample(range(blocks), source.randint(1, window))
            for block in chosen:
                session.fill(bytes(session.block_bytes), block)
            cut = source.randint(0, len(chosen))
            for part in (chosen[:cut], chosen[cut:]):
                device.submit([session.request(block, FlashOp.READ, block, block) for block in part])
            done = session.wait(len(chosen))
            _require(sorted(one.tag for one in done) == sorted(chosen), "tags lost, doubled or made up")
            for block in chosen:
                _require(session.bytes_at(block) == contents[block], f"block {block} read wrong among others")


def readiness_follows_completions(target: FlashUnderTest) -> None:
    """The descriptor is readable when, and only when, poll has something to return; poll never blocks."""
    with _Session(target) as session:
        _require(not session.readable(), "readable before anything was submitted")
        started_s = time.monotonic()
        _require(session.device.poll() == [], "completions out of nothing")
        _require(time.monotonic() - started_s < _NOT_BLOCKING_S, "poll blocked")
        for _ in range(20):
            session.device.submit([session.request(tag, FlashOp.READ, tag, tag) for tag in range(8)])
            left = 8
            while left > 0:
                _require(session.readable(WAIT_S), "completions wait, but the descriptor is not readable")
                done = session.device.poll()
                _require(bool(done), "readable, but poll has nothing")
                left -= len(done)
            _require(left == 0, "more completions than requests")
            _require(not session.readable(), "still readable after all was polled")


def flush_and_discard(target: FlashUnderTest) -> None:
    """FLUSH completes; DISCARD leaves the neighbours alone and the range can be written again."""
    with _Session(target) as session:
        device = session.device
        data = _pattern(21, 24 * session.block_bytes)
        session.fill(data)
        session.do([session.request(1, FlashOp.WRITE, 0, 0, 24)])
        session.do([FlashRequest(2, FlashOp.FLUSH, 0)])
        if not device.caps.discard:
            session.refuse(
                [session.request(3, FlashOp.DISCARD, 8, 0, 8)], errno.EINVAL, "DISCARD without the capability"
            )
            return
        session.do([FlashRequest(3, FlashOp.DISCARD, 8 * session.block_bytes, 0, 8 * session.block_bytes)])
        session.do([session.request(4, FlashOp.READ, 0, 24, 24)])
        read = session.bytes_at(24, 24)
        cut = 8 * session.block_bytes
        _require(read[:cut] == data[:cut], "DISCARD touched what lies before")
        _require(read[2 * cut :] == data[2 * cut :], "DISCARD touched what lies after")
        session.do([session.request(5, FlashOp.WRITE, 8, 0, 8)])
        session.do([session.request(6, FlashOp.READ, 8, 40, 8)])
        _require(session.bytes_at(40, 8) == data[:cut], "a discarded range does not take new data")


def close_waits_and_data_stays(target: FlashUnderTest) -> None:
    """close waits for what is in flight, is idempotent and final; what was written is there after a reopen."""
    data = b""
    with _Session(target) as session:
        count = min(32, session.device.caps.queue_depth_max)
        data = _pattern(31, count * session.block_bytes)
        session.fill(data)
        session.device.submit([session.request(tag, FlashOp.WRITE, tag, tag) for tag in range(count)])
        session.device.close()
        session.device.close()
        session.refuse([session.request(1, FlashOp.READ, 0)], errno.EBADF, "work on a closed device")
        _require(session.device.poll() == [], "completions after close")
    with _Session(target) as session:
        session.do([session.request(1, FlashOp.READ, 0, 0, count)])
        _require(session.bytes_at(0, count) == data, "what was in flight at close is not on flash after a reopen")


def several_memories(target: FlashUnderTest) -> None:
    """Requests may name any registered memory, but no range that two of them would share."""
    with _Session(target) as session:
        second = target.allocate(1 << 20)
        try:
            session.refuse(
                [session.request(1, FlashOp.READ, 0)._replace(address=second.address)], errno.EINVAL, "memory"
            )
            session.device.register_memory(second)
            data = _pattern(41, session.block_bytes)
            session.fill(data)
            session.do([session.request(1, FlashOp.WRITE, 3)])
            session.do([session.request(2, FlashOp.READ, 3)._replace(address=second.address)])
            _require(bytes(second.view[: session.block_bytes]) == data, "read into the second memory differs")
            session.device.close()
        finally:
            second.close()


CHECKS: tuple[Callable[[FlashUnderTest], None], ...] = (
    writes_read_back,
    misuse_is_refused,
    queue_depth_is_kept,
    tags_come_back_once,
    readiness_follows_completions,
    flush_and_discard,
    close_waits_and_data_stays,
    several_memories,
)


def run(target: FlashUnderTest, checks: Iterable[Callable[[FlashUnderTest], None]] = CHECKS) -> None:
    """Run the checks one after the other. Raises ContractViolation at the first that fails."""
    for check in checks:
        check(target)
