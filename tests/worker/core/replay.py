"""Applies plans given on standard input, as a follower does, and prints its digest: run under different hash seeds."""

from __future__ import annotations

import sys

import msgspec

from worker.core.config import CacheConfig, ReusePolicy
from worker.core.plan import decode
from worker.core.replica import Replica


def main() -> None:
    num_pages, plans = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=tuple[int, list[bytes]])
    replica = Replica(CacheConfig(num_pages, 2, policy=ReusePolicy.PER_CONVERSATION))
    for plan in plans:
        replica.apply(decode(plan))
    sys.stdout.write(replica.digest.hex())


if __name__ == "__main__":
    main()
