"""`kinroute replay-recording` as a person or a script runs it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.worker.core.families import Families
from tests.worker.recorders import header_of
from worker.core import checkpoint
from worker.core.recording import Failure, Framer

STEPS = 60
FAILURE = Failure("rank 1 decided otherwise than rank 0 in plan 60", plan=60, rank=1, ours=[], theirs=[])


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kinroute", "replay-recording", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def told(*arguments: str | Path) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(run(*arguments, "--json").stdout)
    return answer


def segment(failure: Failure | None = None, *, wrong_digest_in: int | None = None) -> bytes:
    """Sixty steps of families."""
    families = Families(random.Random(4))
    framer = Framer()
    parts = framer.begin(header_of(families.replica), checkpoint.save(families.replica))
    for plan in families.steps(STEPS):
        digest = families.replica.digest
        if families.replica.number == wrong_digest_in:
            digest = digest[::-1]
        parts += framer.step(plan, digest)
    if failure is not None:
        parts += framer.failure(failure)
    return b"".join(parts)


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    file = tmp_path / "segment-000001.kinrec"
    file.write_bytes(segment())
    return file


def test_a_recording_that_decides_as_it_did_is_exit_code_0(sound: Path) -> None:
    ended = run(sound, "--check", "--decisions", "3")

    assert (ended.returncode, ended.stderr) == (0, "")
    assert "60 of 60 steps, plans 1 to 60" in ended.stdout
    assert "reproduced: every digest is as recorded" in ended.stdout
    assert "the last 3 decisions:\n  plan 60: " in ended.stdout


def test_json_tells_what_the_recording_did(sound: Path) -> None:
    answer = told(sound, "--decisions", "2")

    assert (answer["file"], answer["reproduced"], answer["differs"]) == (str(sound), True, None)
    assert (answer["steps"], answer["first_plan"], answer["last_plan"]) == (STEPS, 1, STEPS)
    assert answer["requests"] + answer["resumed"] == answer["acts"]["admit"] > 0
    assert answer["decisions"]["chunk"] > 0
    assert [one[0] for one in answer["last_decisions"]] == [STEPS, STEPS]
    assert answer["worker"]["instance_id"] == "one"


def test_one_that_decides_otherwise_is_exit_code_1_and_the_step_and_its_decisions_are_named(tmp_path: Path) -> None:
    file = tmp_path / "wrong"
    file.write_bytes(segment(FAILURE, wrong_digest_in=7))

    ended = run(file)

    assert ended.returncode == 1
    assert "DIFFERS in plan 7: its digest is " in ended.stdout
    assert "  decided now: plan 7: chunk " in ended.stdout
    assert f"the group ended there: {FAILURE.why}" in ended.stdout
    assert told(file)["differs"]["plan"] == 7


def test_a_torn_end_is_told_and_what_stands_before_it_is_replayed(sound: Path) -> None:
    sound.write_bytes(sound.read_bytes()[:-1])

    ended = run(sound)

    assert ended.returncode == 0
    assert "torn at offset" in ended.stdout
    assert "59 of 59 steps" in ended.stdout


def test_what_cannot_be_read_is_exit_code_2_with_the_file_and_where_it_is_damaged(sound: Path) -> None:
    damaged = bytearray(sound.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    sound.write_bytes(damaged)

    ended = run(sound)

    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"{sound} cannot be replayed: at offset ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere"], "/nowhere cannot be read: No such file"),
        ([__file__], "this is no recording of Kinroute's"),
        ([Path(__file__).parent], "There is no recording in "),
        ([], "arguments are required: FILE"),
        (["--decisions", "-1", "x"], "--decisions"),
        (["--decisions", "some", "x"], "must be a number from 0 on, not 'some'"),
    ],
    ids=["nowhere", "foreign", "empty", "none", "negative", "no number"],
)
def test_wrong_usage_is_exit_code_2_and_a_sentence(arguments: list[str | Path], message: str) -> None:
    ended = run(*arguments)

    assert (ended.returncode, ended.stdout) == (2, "")
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


def test_of_a_folder_the_last_segment_is_replayed(tmp_path: Path, sound: Path) -> None:
    newer = tmp_path / "segment-000010.kinrec"
    newer.write_bytes(segment(FAILURE))

    answer = told(tmp_path)

    assert (answer["file"], answer["failure"]["why"]) == (str(newer), FAILURE.why)


def test_a_segment_that_was_only_begun_gives_way_to_the_one_before(tmp_path: Path, sound: Path) -> None:
    (tmp_path / "segment-000002.kinrec").write_bytes(segment()[:200])

    assert told(tmp_path)["file"] == str(sound)


def test_it_needs_no_torch(sound: Path) -> None:
    probe = (
        "import sys; from kinroute.__main__ import main; "
        f"code = main(['replay-recording', {str(sound)!r}]); sys.exit(code or ('torch' in sys.modules))"
    )

    ended = subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False)

    assert (ended.returncode, ended.stderr) == (0, b"")
