"""What a batch is answered with: arrays with one element a block, in the order of the request.

Never an exception for a block: the status says what became of it. Made by the client, read by its callers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from common.status import BlockState, Status

Bools: TypeAlias = npt.NDArray[np.bool_]
Answers: TypeAlias = npt.NDArray[np.void]

_PRESENT = bytes((Status.OK,))
_DONE = bytes((Status.OK, Status.EXISTS))
"""Bytes are searched faster than numpy starts."""


class BlockResult(NamedTuple):
    """One block's outcome. `length` is what was moved or is present, `checksum` its XXH3-64 or 0."""

    status: Status
    length: int
    checksum: int
    state: BlockState


class BlockResults:
    """Per-block outcomes of STORE, RETRIEVE, PREFETCH, PIN, UNPIN, TOUCH, DELETE and RELEASE."""

    __slots__ = ("_answers",)

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    @property
    def status(self) -> npt.NDArray[np.uint8]:
        """Values of `common.status.Status`."""
        return self._answers["status"]

    @property
    def state(self) -> npt.NDArray[np.uint8]:
        """Values of `common.status.BlockState`, where the operation tells them."""
        return self._answers["state"]

    @property
    def length(self) -> npt.NDArray[np.uint32]:
        """Bytes moved; the block's whole length where the status is BAD_RANGE."""
        return self._answers["length"]

    @property
    def checksum(self) -> npt.NDArray[np.uint64]:
        return self._answers["checksum"]

    @property
    def ok(self) -> Bools:
        """Where the status is OK or EXISTS."""
        done: Bools = self._answers["status"] <= Status.EXISTS
        return done

    @property
    def all_ok(self) -> bool:
        return not self._answers["status"].tobytes().translate(None, _DONE)

    def counts(self) -> dict[Status, int]:
        """How many blocks had each status that occurred."""
        values, counts = np.unique(self._answers["status"], return_counts=True)
        return {Status(int(value)): int(count) for value, count in zip(values, counts)}

    def __len__(self) -> int:
        return len(self._answers)

    def __getitem__(self, index: int) -> BlockResult:
        status, state, _flags, length, checksum = self._answers[index].item()
        return BlockResult(Status(status), length, checksum, BlockState(state))

    def __iter__(self) -> Iterator[BlockResult]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {status.name}" for status, count in self.counts().items())
        return f"<BlockResults {counts or 'empty'}>"


class LookupResult:
    """Presence of each key of an ordered list. No promise: a block may be gone a moment later."""

    __slots__ = ("_answers", "prefix_blocks")

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        statuses = answers["status"].tobytes()
        self.prefix_blocks = len(statuses) - len(statuses.lstrip(_PRESENT))
        """Length of the longest prefix whose blocks are all present."""

    @property
    def status(self) -> npt.NDArray[np.uint8]:
        """OK where present, MISS where not; DISCONNECTED or DEADLINE where its region did not answer."""
        return self._answers["status"]

    @property
    def present(self) -> Bools:
        there: Bools = self._answers["status"] == Status.OK
        return there

    @property
    def state(self) -> npt.NDArray[np.uint8]:
        return self._answers["state"]

    @property
    def length(self) -> npt.NDArray[np.uint32]:
        """Bytes of the block, 0 where absent."""
        return self._answers["length"]

    def __len__(self) -> int:
        return len(self._answers)

    def __repr__(self) -> str:
        return f"<LookupResult {int(self.present.sum())} of {len(self)} present, prefix of {self.prefix_blocks}>"


class ListedBlock(NamedTuple):
    """One block as LIST reports it. `ttl_s` 0: no time to live."""

    key: bytes
    namespace: bytes
    """Digest of the namespace."""
    length: int
    state: BlockState
    pinned: bool
    age_s: int
    ttl_s: int
    region: str
