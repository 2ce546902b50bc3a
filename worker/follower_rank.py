"""A rank other than 0: follows the plans that come over the control channel."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterable

import msgspec
import structlog

from configuration.reading import SettingsError
from worker.assembly import Assembly, Loaded
from worker.channel import Channel, ChannelError, Kind
from worker.control import Follower, Setup, connect
from worker.core import plan as plans
from worker.exits import ExitCode
from worker.model.sharding import UnsupportedModel
from worker.place import Place
from worker.settings import WorkerSettings
from worker.status import Status

STOP_DEADLINE_S = 5.0

log = structlog.get_logger()


class FollowerRank:
    """The main thread reads the control channel; the engine thread does the rest. Neither outlives rank 0."""

    def __init__(self, settings: WorkerSettings, place: Place, status: Status) -> None:
        self._settings = settings
        self._place = place
        self._status = status
        self._frames: queue.SimpleQueue[tuple[Kind, bytes]] = queue.SimpleQueue()
        self._assembly: Assembly | None = None
        self._code = ExitCode.STOPPED

    def run(self) -> ExitCode:
        place = self._place
        try:
            nonce, channel = connect(
                (place.master_addr, place.control_port), place.token, place.rank, self._settings.group.start_timeout_s
            )
        except (ChannelError, TimeoutError) as error:
            log.error("rank 0 cannot be joined", why=str(error))
            return ExitCode.FAILED
        follower = Follower(channel, self._decisions)
        engine = threading.Thread(target=self._live, args=(channel, follower, nonce), name="engine", daemon=True)
        engine.start()
        try:
            follower.run(self._frames)
        except ChannelError as error:
            log.error("the group is lost", why=str(error))
            return self._code or ExitCode.FAILED
        engine.join(STOP_DEADLINE_S)
        channel.close()
        return ExitCode.FAILED if engine.is_alive() else self._code

    def _decisions(self) -> Iterable[tuple[object, ...]]:
        return self._assembly.engine.decisions() if self._assembly is not None else ()

    def _live(self, channel: Channel, follower: Follower, nonce: bytes) -> None:
        try:
            self._follow(channel, follower, nonce)
        except (UnsupportedModel, SettingsError) as error:
            self._give_up(channel, follower, str(error), ExitCode.CONFIGURATION)
        except Exception as error:
            log.error("the engine failed", exc_info=error)
            self._give_up(channel, follower, repr(error), ExitCode.FAILED)

    def _give_up(self, channel: Channel, follower: Follower, why: str, code: ExitCode) -> None:
        self._code = code
        self._status.say("failed", why=f"rank {self._place.rank} failed: {why}")
        follower.failed(why)
        channel.close()

    def _follow(self, channel: Channel, follower: Follower, nonce: bytes) -> None:
        loaded = Loaded.load(self._settings, self._place, nonce)
        channel.send(Kind.FACTS, msgspec.msgpack.encode(loaded.facts))
        kind, payload = self._frames.get()
        assert kind is Kind.SETUP, f"{kind.name} before SETUP"
        self._assembly = assembly = loaded.open(
            msgspec.msgpack.decode(payload, type=Setup), follower.pulled, follower.copied
        )
        channel.send(Kind.READY, assembly.engine.server.address.encode())
        with contextlib.closing(assembly):
            self._follow_plans(assembly, follower)

    def _follow_plans(self, assembly: Assembly, follower: Follower) -> None:
        engine = assembly.engine
        while True:
            kind, payload = self._frames.get()
            match kind:
                case Kind.PLAN:
                    plan = plans.decode(payload)
                    work = engine.replica.apply(plan)
                    engine.begin(work)
                    # Before the forward, so that rank 0 never waits for it.
                    follower.report(plan.number, engine.replica.digest)
                    engine.forward(work)
                case Kind.CHECK:
                    follower.checked(msgspec.msgpack.encode(engine.held()))
                case Kind.STOP:
                    return
                case _:
                    raise ChannelError(f"rank 0 sent {kind.name} where a plan was due")
