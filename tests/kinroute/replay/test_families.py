"""Made-up families are valid, repeatable, and show what they are named for."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kinroute.__main__ import main
from kinroute.replay.checks import fault_of
from kinroute.replay.families import PRESETS, synthesize
from kinroute.replay.measures import Measures, Spread, measure
from kinroute.replay.readers import read_sessions
from kinroute.replay.traces import TraceError, read
from kinroute.trace_arguments import PRESETS as NAMES
from tests.kinroute.replay.recorded import request, session, write


def measured(preset: str) -> Measures:
    return measure(list(synthesize(PRESETS[preset], 20, 3)))


@pytest.mark.parametrize("preset", PRESETS)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_seed_gives_sessions_that_a_reader_takes(preset: str, seed: int) -> None:
    made = list(synthesize(PRESETS[preset], 2, seed))

    assert [fault_of(one) for one in made] == [None, None]
    assert made == list(synthesize(PRESETS[preset], 3, seed))[:2]


def test_presets_show_what_they_are_named_for() -> None:
    told = {preset: measured(preset) for preset in PRESETS}

    assert told["no-sub-agents"].with_sub_agents == 0
    assert told["no-sub-agents"].requests == sum(
        len(one.requests) for one in synthesize(PRESETS["no-sub-agents"], 20, 3)
    )
    assert 0.2 < told["plain"].with_sub_agents < 0.8
    assert told["resumed-children"].sub_resumed > 2 * told["plain"].sub_resumed
    assert told["wide-fan-out"].sub_agents.median > 3 * told["resumed-children"].sub_agents.median
    assert told["wide-fan-out"].siblings_overlap > 0.8
    assert told["abandoned-parents"].root_turns.median < told["background-children"].root_turns.median


def test_a_parent_goes_on_beside_background_children_and_waits_for_others() -> None:
    def beside(preset: str) -> int:
        """Requests of roots while some child of theirs lives."""
        found = 0
        for one in synthesize(PRESETS[preset], 20, 3):
            lives = {call.conversation: (call.t_s, call.t_s) for call in reversed(one.requests) if call.kind == "sub"}
            for call in one.requests:
                if call.kind == "sub":
                    lives[call.conversation] = (lives[call.conversation][0], call.t_s)
            roots = [call.t_s for call in one.requests if call.kind == "root"]
            found += sum(began < t_s < ended for t_s in roots for began, ended in lives.values())
        return found

    assert beside("background-children") > 5 * beside("plain")


def test_synthetic_paths_are_traces() -> None:
    assert read_sessions([Path("synthetic:plain:3:7")]) == list(synthesize(PRESETS["plain"], 3, 7))
    assert len(read_sessions([Path("synthetic:no-sub-agents")])) == 74
    for wrong in ("synthetic:", "synthetic:other", "synthetic:plain:x", "synthetic:plain:0", "synthetic:plain:1:2:3"):
        with pytest.raises(TraceError, match="PRESET one of plain, "):
            read_sessions([Path(wrong)])


def test_the_command_writes_a_trace_that_is_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / name for name in ("one.jsonl.gz", "two.jsonl.gz")]
    for file in files:
        assert main(["trace", "synthesize", "wide-fan-out", str(file), "--sessions", "2", "--seed", "5"]) == 0

    assert read(files[0]) == list(synthesize(PRESETS["wide-fan-out"], 2, 5))
    assert files[0].read_bytes() == files[1].read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one.jsonl.gz", "two.jsonl.gz"]
    assert "2 sessions, " in capsys.readouterr().out


def test_an_unknown_preset_is_answered_with_those_that_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tuple(PRESETS) == NAMES
    with pytest.raises(SystemExit):
        main(["trace", "synthesize", "wide", str(tmp_path / "x")])
    refusal = capsys.readouterr().err.splitlines()[-1]
    assert all(name in refusal for name in NAMES)


def test_what_is_measured_of_a_session(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    child = request(2.0, (0, 1), (9, 2), conversation="a", parent="root", kind="sub", stop="end")
    made = session(request(0.0, (0, 3)), child, request(5.0, (0, 3), (3, 2)), request(9.0, (0, 1), (12, 3), stop="end"))
    told = measure(read(write(tmp_path / "x.jsonl", made)))

    assert (told.sessions, told.requests, told.with_sub_agents, told.root_turns) == (1, 4, 1.0, Spread(3, 3))
    assert (told.first_prompt_tokens, told.grown_tokens) == (Spread(12, 12), Spread(8, 8))
    assert (told.tool_gap_s, told.edits, told.compactions, told.kept_at_compaction) == (Spread(3, 3), 0, 0.5, 0.2)
    assert (told.sub_turns, told.sub_first_tokens, told.shared_tokens) == (Spread(1, 1), Spread(12, 12), Spread(4, 4))
    assert main(["trace", "measure", str(tmp_path / "x.jsonl")]) == 0
    assert "tool_gap_s           median 3, p90 3" in capsys.readouterr().out
