"""Sleeping on a 32-bit word of shared memory, on Linux, without a compiler."""

from __future__ import annotations

import ctypes
import platform

_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_NUMBER = {"x86_64": 202, "aarch64": 98}
_STORES_STAY_IN_ORDER = platform.machine() == "x86_64"
_syscall = ctypes.CDLL(None, use_errno=True).syscall
_everybody = ctypes.c_int(2**31 - 1)
_own_word = ctypes.c_uint32(0)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _number() -> int:
    machine = platform.machine()
    if machine not in _NUMBER:
        raise OSError(f"shared-memory ranks need x86_64 or aarch64, not {machine}")
    return _NUMBER[machine]


def wait(address: int, expected: int, nap_s: float) -> None:
    """Sleep while the word at `address` is `expected`, `nap_s` at most; may return early."""
    nap = _Timespec(0, int(nap_s * 1e9))
    _syscall(_number(), ctypes.c_void_p(address), _FUTEX_WAIT, ctypes.c_uint32(expected), ctypes.byref(nap), None, 0)


def wake(address: int) -> None:
    """Wake all who sleep on the word at `address`."""
    _syscall(_number(), ctypes.c_void_p(address), _FUTEX_WAKE, _everybody, None, None, 0)


def fence() -> None:
    """What was written before is seen before what is written after, and likewise for reads.

    x86 keeps that order by itself; elsewhere a wake nobody waits for does it, since the kernel puts a full barrier into
    every wake.
    """
    if not _STORES_STAY_IN_ORDER:
        wake(ctypes.addressof(_own_word))
