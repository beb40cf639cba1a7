"""Processor time of this and other processes to the nanosecond, by the clock that the kernel keeps for each.

POSIX: clock_getcpuclockid(3). All threads of a process count, those that have ended too; time in the kernel counts
as much as in user space. Work that the kernel does for nobody in particular (interrupts, its own threads) does not.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Mapping, Sequence
from time import clock_gettime_ns
from typing import Final

from common.errors import LowerLayerError

AGENT: Final = "agent"
DPU: Final = "dpu"
_libc = ctypes.CDLL(None)


def clock_of(pid: int) -> int:
    """The clock of a process, for `time.clock_gettime_ns`. Raises LowerLayerError for one that does not run."""
    clock = ctypes.c_int32()
    error = _libc.clock_getcpuclockid(ctypes.c_int32(pid), ctypes.byref(clock))
    if error:
        raise LowerLayerError("clock_getcpuclockid", error, f"process {pid}")
    return clock.value


class CpuMeter:
    """Reads the clocks of several sides at once: `pids` by side."""

    def __init__(self, pids: Mapping[str, Sequence[int]]) -> None:
        self._clocks = {side: [clock_of(pid) for pid in numbers] for side, numbers in pids.items() if numbers}

    @classmethod
    def of_pod(cls, dpu_pids: Sequence[int]) -> CpuMeter:
        """This process as the agent, and the processes of DPUs on this machine, if there are any."""
        return cls({AGENT: [os.getpid()], DPU: dpu_pids})

    def read_s(self) -> dict[str, float]:
        """Seconds used so far, by side. Raises LowerLayerError when a process has ended."""
        try:
            return {side: sum(map(clock_gettime_ns, clocks)) / 1e9 for side, clocks in self._clocks.items()}
        except OSError as error:
            raise LowerLayerError("clock_gettime", error.errno or errno.ESRCH, "a measured process ended") from error

    def since_s(self, before: Mapping[str, float]) -> dict[str, float]:
        """Seconds used since `before`, which `read_s` gave."""
        return {side: now - before[side] for side, now in self.read_s().items()}
