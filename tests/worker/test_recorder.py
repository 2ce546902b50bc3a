"""The recorder on real files: bounded, private, without gaps, and never in the way of serving."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.worker.core.engines import TestEngine, make_engine
from tests.worker.core.families import Families, family_config
from tests.worker.recorders import TOTAL, header_of, make_recorder
from tests.worker.recording_alone import STEPS
from worker.core.plan import encode
from worker.core.recording import Failure, read
from worker.core.replay import replay
from worker.core.replica import Replica
from worker.recorder import MIN_PLANS, Recorder, open_recorder
from worker.recording_ring import Ring, latest
from worker.telemetry import Metrics

WAIT_S = 10.0


def segments(folder: Path) -> list[Path]:
    """Oldest first."""
    return latest(folder)[::-1]


def total_bytes(folder: Path) -> int:
    """What they took when the newest was looked at: only that one grows, and only the oldest are deleted."""
    total = 0
    for file in latest(folder):
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


def dropped(metrics: Metrics) -> float:
    return metrics.registry.get_sample_value(TOTAL) or 0.0


def serve(engine: TestEngine, recorder: Recorder, prompt_tokens: int = 0) -> None:
    """One plan; with a new prompt of so many tokens, if any."""
    if prompt_tokens:
        engine.submit(engine.replica.number + 1, range(prompt_tokens), max_tokens=64)
    made = engine.scheduler.plan(engine.replica.number)
    assert made is not None
    recorder.record(encode(made[0]), engine.replica.digest)


def wait_for_segments(count: int, folder: Path, engine: TestEngine, recorder: Recorder) -> None:
    """Between two plans, until there are so many."""
    end_s = time.monotonic() + WAIT_S
    while len(segments(folder)) < count:
        assert time.monotonic() < end_s, f"only {segments(folder)} after {WAIT_S} s"
        recorder.rest(engine.replica)
        time.sleep(0.01)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def test_the_ring_stays_within_its_bound_and_every_segment_in_it_replays_alone(tmp_path: Path) -> None:
    max_bytes = 400_000
    families = Families(random.Random(1))
    recorder = make_recorder(tmp_path, families.replica, max_bytes=max_bytes, min_plans=16)

    for number, plan in enumerate(families.steps(4000)):
        recorder.record(plan, families.replica.digest)
        recorder.rest(families.replica)
        if number % 100 == 0:
            assert total_bytes(tmp_path) <= max_bytes
    recorder.close()

    kept = segments(tmp_path)
    assert kept[0].name > "segment-000001.kinrec"
    assert max_bytes // 2 < total_bytes(tmp_path) <= max_bytes
    replays = [replay(read(file.read_bytes())) for file in kept]
    assert [one.departure for one in replays] == [None] * len(kept)
    assert replays[-1].last_plan == families.replica.number
    assert all(after.first_plan == before.last_plan + 1 for before, after in itertools.pairwise(replays))


def test_no_segment_takes_more_than_half_of_its_ring(tmp_path: Path) -> None:
    """So that the one before it is still there when a group fails behind the first plans of a new one."""
    metrics = Metrics()
    families = Families(random.Random(1))
    recorder = make_recorder(tmp_path, families.replica, max_bytes=100_000, metrics=metrics)

    for plan in families.steps(400):
        recorder.record(plan, families.replica.digest)
    recorder.close()

    assert 40_000 < total_bytes(tmp_path) <= 51_000
    assert replay(read(segments(tmp_path)[0].read_bytes())).steps == 400 - dropped(metrics)


@pytest.mark.slow
def test_after_an_hour_of_load_the_last_segment_of_a_ring_of_64_mib_replays_alone(tmp_path: Path) -> None:
    max_bytes = 64 << 20
    families = Families(
        random.Random(2),
        Replica(family_config(num_pages=4096, tokens_per_block=32)),
        prompt_tokens=4000,
        max_num_tokens=2048,
        plan_ms=320,
    )
    recorder = make_recorder(tmp_path, families.replica, max_bytes=max_bytes)

    for plan in families.steps(11_250):
        recorder.record(plan, families.replica.digest)
        recorder.rest(families.replica)
    recorder.close()

    assert families.now_ms >= 3_600_000
    kept = segments(tmp_path)
    assert kept[0].name > "segment-000001.kinrec"
    assert total_bytes(tmp_path) <= max_bytes
    last = replay(read(kept[-1].read_bytes()))
    assert last.departure is None
    assert last.steps > 0
    assert last.last_plan == families.replica.number
    whole = replay(read(kept[-2].read_bytes()))
    assert whole.departure is None
    assert whole.steps >= MIN_PLANS
    assert min(whole.stats.demoted_conversations, sum(whole.stats.evicted_pages.values())) > 0


def test_only_its_user_may_read_a_recording(tmp_path: Path) -> None:
    (tmp_path / "ring" / "0").mkdir(parents=True, mode=0o755)
    with umask(0):
        engine = make_engine()
        make_recorder(tmp_path / "ring", engine.replica, max_bytes=1 << 20).close()
        make_recorder(tmp_path / "new" / "ring", engine.replica, max_bytes=1 << 20).close()

    for ring in (tmp_path / "ring" / "0", tmp_path / "new" / "ring" / "0"):
        assert stat.S_IMODE(ring.stat().st_mode) == 0o700
        assert [stat.S_IMODE(file.stat().st_mode) for file in segments(ring)] == [0o600]
    assert stat.S_IMODE((tmp_path / "new" / "ring").stat().st_mode) == 0o700


def test_a_link_in_place_of_the_subfolder_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "ring").mkdir()
    (tmp_path / "ring" / "0").symlink_to(elsewhere)

    ring = Ring(tmp_path / "ring", 1 << 20)
    ring.close()

    assert ring.folder.name == "1"
    assert not list(elsewhere.iterdir())


def test_a_link_in_place_of_a_segment_switches_recording_off_and_its_target_stays(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("stays")
    (tmp_path / "ring" / "0").mkdir(parents=True)
    (tmp_path / "ring" / "0" / "segment-000001.kinrec").symlink_to(target)
    metrics = Metrics()
    engine = make_engine()

    with capture_logs() as logs:
        make_recorder(tmp_path / "ring", engine.replica, max_bytes=1 << 20, metrics=metrics).close()

    assert target.read_text() == "stays"
    assert [line["event"] for line in logs] == ["a checkpoint was taken", "recording is switched off"]


def test_two_workers_do_not_share_a_ring_and_the_next_one_goes_on_where_the_last_ended(tmp_path: Path) -> None:
    engine = make_engine()
    first, second = (make_recorder(tmp_path, engine.replica, max_bytes=1 << 20) for _ in range(2))
    first.close()

    make_recorder(tmp_path, engine.replica, max_bytes=1 << 20).close()
    second.close()

    found = sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.kinrec"))
    assert found == ["0/segment-000001.kinrec", "0/segment-000002.kinrec", "1/segment-000001.kinrec"]


def test_a_ring_that_may_take_less_than_before_is_cut_at_once(tmp_path: Path) -> None:
    engine = make_engine()
    for _ in range(4):
        make_recorder(tmp_path, engine.replica, max_bytes=1 << 20).close()
    size = segments(tmp_path)[0].stat().st_size

    Ring(tmp_path, 2 * size).close()

    assert [file.name for file in segments(tmp_path)] == ["segment-000003.kinrec", "segment-000004.kinrec"]


def test_a_writer_that_falls_behind_costs_the_rest_of_a_segment_and_leaves_no_gap_in_one(tmp_path: Path) -> None:
    metrics = Metrics()
    engine = make_engine(num_pages=600)
    recorder = make_recorder(tmp_path, engine.replica, max_bytes=1 << 20, metrics=metrics, queue_bytes=600, min_plans=1)

    serve(engine, recorder, prompt_tokens=2)
    serve(engine, recorder, prompt_tokens=800)
    serve(engine, recorder, prompt_tokens=2)
    wait_for_segments(2, tmp_path, engine, recorder)
    serve(engine, recorder, prompt_tokens=2)
    recorder.close()

    before, after = (read(file.read_bytes()) for file in segments(tmp_path))
    assert [step.plan.number for step in before.steps()] == [1]
    assert [step.plan.number for step in after.steps()] == [4]
    assert (replay(before).departure, replay(after).departure) == (None, None)
    assert dropped(metrics) == 2


def test_a_failure_is_the_last_record_and_its_file_is_named(tmp_path: Path) -> None:
    engine = make_engine()
    recorder = make_recorder(tmp_path, engine.replica, max_bytes=1 << 20)
    serve(engine, recorder, prompt_tokens=3)
    failure = Failure("rank 1 decided otherwise", plan=1, rank=1, ours=[[1, "chunk"]], theirs=[])

    path = recorder.fail(failure)
    serve(engine, recorder, prompt_tokens=3)

    assert path == segments(tmp_path)[-1]
    segment = read(path.read_bytes())
    assert (segment.num_steps, segment.failure) == (1, failure)
    assert recorder.fail(Failure("another thread has seen it, too")) == path


def test_decisions_that_do_not_fit_into_the_ring_leave_the_reason(tmp_path: Path) -> None:
    engine = make_engine()
    recorder = make_recorder(tmp_path, engine.replica, max_bytes=20_000)
    failure = Failure("too much to say", plan=1, rank=1, ours=[[1, "clear", "x" * 20_000]], theirs=[])

    path = recorder.fail(failure)

    assert path is not None
    assert read(path.read_bytes()).failure == Failure("too much to say", plan=1, rank=1)


def test_a_ring_too_small_for_checkpoints_is_off_and_says_so_once(tmp_path: Path) -> None:
    metrics = Metrics()
    engine = make_engine(num_pages=600)

    with capture_logs() as logs:
        recorder = make_recorder(tmp_path, engine.replica, max_bytes=5000, metrics=metrics)
        for _ in range(3):
            serve(engine, recorder, prompt_tokens=2)
            recorder.rest(engine.replica)
        recorder.close()

    assert [line["event"] for line in logs] == ["recording is switched off"]
    assert "kv_cache_config.recording_max_bytes is 5000" in logs[0]["why"]
    assert metrics.registry.get_sample_value("kinroute_worker_recording_on") == 0
    assert dropped(metrics) == 3


def test_a_full_disk_switches_recording_off_once_and_serving_goes_on(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.worker.recording_alone", str(tmp_path)], capture_output=True, check=True
    )

    said = json.loads(ended.stdout)
    assert said["steps"] == STEPS
    assert said["on"] == 0
    assert said["dropped"] > 0
    assert said["failed_in"] is None
    assert ["File too large" in why for why in said["errors"]] == [True]
    # What was written before is whole, but for the record that found no room.
    segment = read(segments(tmp_path)[-1].read_bytes())
    assert segment.torn_at is not None
    assert replay(segment).steps > 0


def test_a_folder_that_cannot_be_used_leaves_the_worker_without_recordings(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    replica = make_engine().replica

    with capture_logs() as logs:
        below_a_file = open_recorder(tmp_path / "file" / "ring", 1 << 20, header_of(replica), Metrics())
        without_home = open_recorder(None, 1 << 20, header_of(replica), Metrics())

    assert (below_a_file, without_home) == (None, None)
    assert ["recording_dir" in line["event"] for line in logs] == [True, True]


def test_a_ring_of_no_bytes_is_off_without_a_word(tmp_path: Path) -> None:
    with capture_logs() as logs:
        assert open_recorder(tmp_path, 0, header_of(make_engine().replica), Metrics()) is None

    assert (logs, list(tmp_path.iterdir())) == ([], [])
