"""One io_uring, by ctypes and mmap: set up, submission entries in, completions out.

Why not a binding: the one on PyPI takes a bytearray for a read and bytes for a write, so it cannot name memory by
address, its completion index does not wrap with the ring, and it holds the GIL in the kernel.
SINGLE_ISSUER | DEFER_TASKRUN (Linux 6.1) is required, not preferred: completions are then posted only inside
the owner's own `enter`, so that plain loads and stores of the shared indices are correct on Arm too.
Knows nothing of flash; used by `dpu_app.flash.io_uring` alone, always from the thread that made it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct

from doca_shims.api import ShimError

# Numbers of <linux/io_uring.h>; the system calls have the same ones on x86-64 and arm64.
_SYS_SETUP, _SYS_ENTER, _SYS_REGISTER = 425, 426, 427
_SETUP_CQSIZE = 1 << 3
_SETUP_SUBMIT_ALL = 1 << 7
_SETUP_SINGLE_ISSUER = 1 << 12
_SETUP_DEFER_TASKRUN = 1 << 13
_ENTER_GETEVENTS = 1
_OFF_SQ_RING, _OFF_SQES = 0, 0x10000000
_FEAT_SINGLE_MMAP = 1
_REGISTER_FILES = 2
_UNREGISTER_FILES = 3
_REGISTER_EVENTFD = 4
_REGISTER_BUFFERS2 = 15
_REGISTER_BUFFERS_UPDATE = 16
_RSRC_REGISTER_SPARSE = 1
FIXED_FILE = 1
"""Submission flag: `fd` is an index of the registered files."""

_PARAMS = struct.Struct("7I3I 10I 10I")
"""io_uring_params: 7 words and 3 reserved, then the offsets of the two rings (their last two words are one u64)."""
_SQE = struct.Struct("=BBHiQQIIQHHiQQ")
"""opcode, flags, ioprio, fd, off, addr, len, op flags, user_data, buf_index, personality, file_index, addr3, pad."""
_CQE = struct.Struct("=Qii")


class Ring:
    """`entries` is a power of two. Raises ShimError whose operation starts with ``io_uring`` where the kernel has no
    io_uring (ENOSYS), forbids it (EPERM), is older than 6.1 (EINVAL), or has no memory for it (ENOMEM)."""

    def __init__(self, entries: int) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        params = ctypes.create_string_buffer(_PARAMS.size)
        flags = _SETUP_CQSIZE | _SETUP_SUBMIT_ALL | _SETUP_SINGLE_ISSUER | _SETUP_DEFER_TASKRUN
        struct.pack_into("3I", params, 0, entries, entries, flags)
        self.fd = self._setup(entries, params)
        try:
            self._map(params)
        except BaseException:
            os.close(self.fd)
            raise

    def _setup(self, entries: int, params: ctypes.Array[ctypes.c_char]) -> int:
        fd = int(self._libc.syscall(_SYS_SETUP, entries, params))
        if fd >= 0:
            return fd
        code = ctypes.get_errno()
        reasons = {
            errno.ENOSYS: "this kernel has no io_uring",
            errno.EPERM: "io_uring is forbidden here (kernel.io_uring_disabled, or a seccomp filter)",
            errno.EINVAL: "this kernel's io_uring lacks SINGLE_ISSUER and DEFER_TASKRUN (Linux 6.1 or newer is needed)",
        }
        raise ShimError(code, "io_uring_setup", reasons.get(code, os.strerror(code)))

    def _map(self, params: ctypes.Array[ctypes.c_char]) -> None:
        words = _PARAMS.unpack(params)
        sq_entries, cq_entries, features = words[0], words[1], words[5]
        if not features & _FEAT_SINGLE_MMAP:
            raise ShimError(errno.EINVAL, "io_uring_setup", "this kernel's io_uring lacks SINGLE_MMAP")
        sq, cq = words[10:20], words[20:30]
        ring_bytes = max(sq[6] + sq_entries * 4, cq[5] + cq_entries * _CQE.size)
        self._ring_map = mmap.mmap(self.fd, ring_bytes, mmap.MAP_SHARED, offset=_OFF_SQ_RING)
        self._sqe_map = mmap.mmap(self.fd, sq_entries * _SQE.size, mmap.MAP_SHARED, offset=_OFF_SQES)
        self._words = memoryview(self._ring_map)[: ring_bytes & ~3].cast("I")
        self._sq_tail_word, self._sq_head_word = sq[1] // 4, sq[0] // 4
        self._cq_head_word, self._cq_tail_word = cq[0] // 4, cq[1] // 4
        self._sq_mask, self._cq_mask = sq_entries - 1, cq_entries - 1
        self._cqes_offset_bytes = cq[5]
        self._sq_tail = self._words[self._sq_tail_word]
        self._cq_head = self._words[self._cq_head_word]
        array_word = sq[6] // 4
        for index in range(sq_entries):
            self._words[array_word + index] = index

    def register_file(self, fd: int) -> None:
        """Make `fd` registered file 0."""
        self._register(
            _REGISTER_FILES, ctypes.create_string_buffer(struct.pack("i", fd), 4), 1, "io_uring_register_files"
        )

    def register_event_fd(self, event_fd: int) -> None:
        """Have the kernel add to `event_fd` when there is something to complete, and once more when `completions`
        then takes it: readiness that outlasts the completions is the caller's to drain."""
        argument = ctypes.create_string_buffer(struct.pack("i", event_fd), 4)
        self._register(_REGISTER_EVENTFD, argument, 1, "io_uring_register_eventfd")

    def register_buffer_table(self, slots: int) -> None:
        """An empty table of fixed buffers."""
        argument = ctypes.create_string_buffer(struct.pack("IIQQQ", slots, _RSRC_REGISTER_SPARSE, 0, 0, 0), 32)
        self._register(_REGISTER_BUFFERS2, argument, 32, "io_uring_register_buffers")

    def register_buffer(self, slot: int, address: int, length_bytes: int) -> None:
        """Pin memory as fixed buffer `slot`. Raises ShimError ENOMEM past RLIMIT_MEMLOCK."""
        vector = ctypes.create_string_buffer(struct.pack("QQ", address, length_bytes), 16)
        argument = struct.pack("IIQQII", slot, 0, ctypes.addressof(vector), 0, 1, 0)
        self._register(
            _REGISTER_BUFFERS_UPDATE, ctypes.create_string_buffer(argument, 32), 32, "io_uring_register_buffers"
        )

    def _register(self, opcode: int, argument: ctypes.Array[ctypes.c_char], count: int, operation: str) -> None:
        if self._libc.syscall(_SYS_REGISTER, self.fd, opcode, argument, count) < 0:
            code = ctypes.get_errno()
            raise ShimError(code, operation, os.strerror(code))

    def prepare(
        self,
        opcode: int,
        user_data: int,
        *,
        offset: int = 0,
        address: int = 0,
        length: int = 0,
        op_flags: int = 0,
        buffer_slot: int = 0,
        address3: int = 0,
    ) -> None:
        """Fill the next entry, for registered file 0. The caller keeps within the ring's size."""
        _SQE.pack_into(
            self._sqe_map,
            (self._sq_tail & self._sq_mask) * _SQE.size,
            opcode,
            FIXED_FILE,
            0,
            0,
            offset,
            address,
            length,
            op_flags,
            user_data,
            buffer_slot,
            0,
            0,
            address3,
            0,
        )
        self._sq_tail = (self._sq_tail + 1) & 0xFFFFFFFF

    def submit(self) -> tuple[int, int]:
        """Start what was prepared, in one system call if the kernel will. Returns how many it took, and the errno
        with which it refused the rest (0: none were left). What it refused is forgotten."""
        self._words[self._sq_tail_word] = self._sq_tail
        taken = 0
        pending = (self._sq_tail - self._words[self._sq_head_word]) & 0xFFFFFFFF
        while pending:
            count = int(self._libc.syscall(_SYS_ENTER, self.fd, pending, 0, 0, None, 0))
            code = ctypes.get_errno() if count < 0 else errno.EAGAIN
            if count < 0 and code == errno.EINTR:
                continue
            if count <= 0:
                self._sq_tail = self._words[self._sq_head_word]
                self._words[self._sq_tail_word] = self._sq_tail
                return taken, code
            taken += count
            pending -= count
        return taken, 0

    def completions(self, wait_count: int = 0) -> list[tuple[int, int]]:
        """(user_data, result) of what has completed; waits until `wait_count` have. Raises ShimError."""
        while self._libc.syscall(_SYS_ENTER, self.fd, 0, wait_count, _ENTER_GETEVENTS, None, 0) < 0:
            code = ctypes.get_errno()
            if code != errno.EINTR:
                raise ShimError(code, "io_uring_enter", os.strerror(code))
        tail = self._words[self._cq_tail_word]
        done = []
        while self._cq_head != tail:
            entry = self._cqes_offset_bytes + (self._cq_head & self._cq_mask) * _CQE.size
            user_data, result, _flags = _CQE.unpack_from(self._ring_map, entry)
            done.append((user_data, result))
            self._cq_head = (self._cq_head + 1) & 0xFFFFFFFF
        self._words[self._cq_head_word] = tail
        return done

    def close(self) -> None:
        """Unmap and close. Idempotent. Nothing may be in flight. The kernel frees a ring some time after its
        descriptor closes; the registered file it lets go at once."""
        if self.fd < 0:
            return
        self._libc.syscall(_SYS_REGISTER, self.fd, _UNREGISTER_FILES, None, 0)
        self._words.release()
        self._ring_map.close()
        self._sqe_map.close()
        os.close(self.fd)
        self.fd = -1
