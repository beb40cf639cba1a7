"""From any object that holds host memory to its address and length, without a copy.

Accepts numpy arrays, whatever has the buffer protocol (bytearray, memoryview, mmap, array), `__array_interface__`,
torch tensors in host memory (by their own methods: torch is never imported) and DLPack. Read-only, scattered or
device memory is refused with a sentence that says so. Called by `host_agent.memory`; registers nothing itself.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

from common.errors import UserError

_DLPACK_HOST_DEVICES = (1, 3, 11)
"""kDLCPU, kDLCUDAHost, kDLROCMHost."""
_DLPACK_NAME = b"dltensor"


class Buffer(NamedTuple):
    """`length_bytes` of writable memory at virtual `address`. `owner` keeps it alive while referenced."""

    address: int
    length_bytes: int
    owner: Any


class _DlTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def describe(memory: Any) -> Buffer:
    """Where `memory` is. Raises UserError for what cannot be a source or destination of a transfer."""
    if isinstance(memory, np.ndarray):
        return _describe_array(memory, memory)
    if hasattr(memory, "data_ptr") and hasattr(memory, "element_size"):
        return _describe_tensor(memory)
    if hasattr(memory, "__array_interface__"):
        return _describe_array(np.asarray(memory), memory)
    try:
        view = memoryview(memory)
    except TypeError:
        if hasattr(memory, "__dlpack__"):
            return _describe_dlpack(memory)
        raise UserError(
            f"a {type(memory).__name__} is not memory: give a numpy array, a writable buffer such as a bytearray, "
            f"a tensor in host memory, or fabric memory from Client.allocate"
        ) from None
    if view.readonly:
        raise UserError(f"this {type(memory).__name__} is read-only; copy it into a bytearray or an array first")
    if not view.contiguous:
        raise _scattered(memory)
    array = np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)
    # Not `array.ctypes.data`, which makes an object of ctypes on the way.
    return Buffer(int(array.__array_interface__["data"][0]), view.nbytes, (array, memory))


def view_of(buffer: Buffer) -> memoryview:
    """The buffer's bytes, format 'B', writable. Valid only while `buffer.owner` is referenced."""
    return memoryview((ctypes.c_ubyte * buffer.length_bytes).from_address(buffer.address)).cast("B")


def _describe_array(array: np.ndarray[Any, Any], owner: Any) -> Buffer:
    if not array.flags.writeable:
        raise UserError("this array is read-only; copy it first, or make it writeable")
    if not array.flags.c_contiguous:
        raise _scattered(owner)
    if array.dtype.hasobject:
        raise UserError("this array holds Python objects, which mean nothing elsewhere")
    return Buffer(int(array.__array_interface__["data"][0]), array.nbytes, (array, owner))


def _describe_tensor(tensor: Any) -> Buffer:
    device = str(getattr(tensor.device, "type", tensor.device))
    if device != "cpu":
        raise UserError(f"this tensor is in {device} memory, which this fabric cannot register; use host memory")
    if not tensor.is_contiguous():
        raise _scattered(tensor)
    return Buffer(int(tensor.data_ptr()), int(tensor.numel()) * int(tensor.element_size()), tensor)


def _describe_dlpack(memory: Any) -> Buffer:
    device_type = int(memory.__dlpack_device__()[0])
    if device_type not in _DLPACK_HOST_DEVICES:
        raise UserError(f"this {type(memory).__name__} is in memory of DLPack device {device_type}; use host memory")
    capsule = memory.__dlpack__()
    pointer = _capsule_pointer(capsule, _DLPACK_NAME)
    tensor = ctypes.cast(pointer, ctypes.POINTER(_DlTensor)).contents
    shape = [tensor.shape[axis] for axis in range(tensor.ndim)]
    if tensor.strides:
        expected = 1
        for axis in reversed(range(tensor.ndim)):
            if shape[axis] != 1 and tensor.strides[axis] != expected:
                raise _scattered(memory)
            expected *= shape[axis]
    elements = 1
    for size in shape:
        elements *= size
    length_bytes = (elements * tensor.bits * tensor.lanes + 7) // 8
    return Buffer((tensor.data or 0) + tensor.byte_offset, length_bytes, (capsule, memory))


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


def _scattered(memory: Any) -> UserError:
    return UserError(
        f"this {type(memory).__name__} is not one contiguous piece of memory; "
        f"give the whole of it, or its contiguous parts as a scatter list"
    )
