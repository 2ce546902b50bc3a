"""Pages that another process of this host shares: who may, where to ask, and the mapping itself."""

from __future__ import annotations

import hashlib
import mmap
import os
import socket
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CREDENTIALS = struct.Struct("3i")


def host_key() -> str:
    """Equal for processes that can reach each other's abstract sockets and map each other's memory: same boot, same
    network namespace, same user. Empty where this system does not tell."""
    try:
        parts = (BOOT_ID.read_text(), str(Path("/proc/self/ns/net").stat().st_ino), str(os.geteuid()))
    except OSError:
        return ""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def socket_name(address: str) -> str:
    """The abstract socket beside the TCP port `address`, which one process of a network namespace has."""
    return f"\0kinroute-kv-{address}"


def listen(address: str, backlog: int) -> socket.socket:
    """The Unix socket beside that TCP port. Raises OSError where somebody else has its name."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(socket_name(address))
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def is_same_user(sock: socket.socket) -> bool:
    """Whether the other end of this Unix socket runs as our user; the names of abstract sockets are anybody's."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.geteuid())


def read_only(descriptor: int) -> int:
    """Another descriptor of the same memory, which cannot be mapped for writing. The caller's to close."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def map_read_only(descriptor: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    """`num_bytes` bytes of the descriptor's memory, mapped as long as an array refers to them. Closes the descriptor.

    Raises OSError where it has less.
    """
    try:
        if os.fstat(descriptor).st_size < num_bytes:
            raise OSError("the shared pool is smaller than it was said to be")
        return np.frombuffer(mmap.mmap(descriptor, num_bytes, prot=mmap.PROT_READ), np.uint8)
    finally:
        os.close(descriptor)
