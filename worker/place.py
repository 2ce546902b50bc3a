"""Where a rank stands in its group: told through the environment, by our launcher or by torchrun."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from configuration.reading import SettingsError
from worker.settings import WorkerSettings

CONTROL_FD = "KINROUTE_CONTROL_FD"
CONTROL_PORT = "KINROUTE_CONTROL_PORT"
MISMATCHES = "KINROUTE_DIGEST_MISMATCHES"
PARENT = "KINROUTE_LAUNCHER_PID"
SETTINGS = "KINROUTE_RANK_SETTINGS"
STATUS_FD = "KINROUTE_STATUS_FD"
TOKEN = "KINROUTE_GROUP_TOKEN"  # noqa: S105 - the name of a variable
MIN_TOKEN_BYTES = 16


@dataclass(frozen=True, slots=True)
class Place:
    """`control_fd`: on rank 0, a listening socket that it inherited; None: it binds `control_port` itself.

    `status_fd`: where this rank tells its launcher how it is; None under torchrun. `token`: known to this group alone.
    `mismatches`: in how many plans the ranks of this worker decided differently before this group was started.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int
    control_port: int
    token: bytes
    control_fd: int | None = None
    status_fd: int | None = None
    launcher_pid: int | None = None
    mismatches: int = 0

    @classmethod
    def from_environment(cls, settings: WorkerSettings, environment: Mapping[str, str] = os.environ) -> Self:
        """Raises SettingsError, naming the variable."""
        try:
            rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            master_port = int(environment["MASTER_PORT"])
            master_addr = environment["MASTER_ADDR"]
            local_rank = int(environment.get("LOCAL_RANK", "0"))
            local_world_size = int(environment.get("LOCAL_WORLD_SIZE", "1"))
        except (KeyError, ValueError) as error:
            raise SettingsError(f"The environment that torchrun sets is incomplete: {error}.") from error
        if world_size != settings.tensor_parallel_size:
            raise SettingsError(
                f"WORLD_SIZE is {world_size}, but tensor_parallel_size is {settings.tensor_parallel_size}: start "
                "as many ranks."
            )
        control_port = environment.get(CONTROL_PORT) or settings.group.control_port or master_port + 1
        return cls(
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            local_world_size=local_world_size,
            master_addr=master_addr,
            master_port=master_port,
            control_port=int(control_port),
            token=_token(settings, environment, world_size),
            control_fd=_number(environment, CONTROL_FD),
            status_fd=_number(environment, STATUS_FD),
            launcher_pid=_number(environment, PARENT),
            mismatches=_number(environment, MISMATCHES) or 0,
        )

    @property
    def is_one_host(self) -> bool:
        return self.local_world_size == self.world_size

    def to_environment(self) -> dict[str, str]:
        environment = {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            CONTROL_PORT: str(self.control_port),
            TOKEN: self.token.hex(),
            MISMATCHES: str(self.mismatches),
        }
        for name, number in ((CONTROL_FD, self.control_fd), (STATUS_FD, self.status_fd), (PARENT, self.launcher_pid)):
            if number is not None:
                environment[name] = str(number)
        return environment

    def control_listener(self) -> socket.socket:
        """Rank 0's listening socket of the control channel."""
        if self.control_fd is not None:
            return socket.socket(fileno=self.control_fd)
        return socket.create_server((self.master_addr, self.control_port), backlog=self.world_size)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    return int(text) if text else None


def _token(settings: WorkerSettings, environment: Mapping[str, str], world_size: int) -> bytes:
    if TOKEN in environment:
        return bytes.fromhex(environment[TOKEN])
    if world_size == 1:
        return secrets.token_bytes(32)
    file = settings.group.token_file
    if file is None:
        raise SettingsError(
            "group.token_file is missing: ranks that torchrun starts need a secret that all of them can read."
        )
    try:
        token = file.read_bytes().strip()
    except OSError as error:
        raise SettingsError(f"group.token_file is {str(file)!r}, which cannot be read: {error.strerror}.") from error
    if len(token) < MIN_TOKEN_BYTES:
        raise SettingsError(f"group.token_file is {str(file)!r}, which holds less than {MIN_TOKEN_BYTES} bytes.")
    return token
