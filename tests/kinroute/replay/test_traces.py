from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kinroute.replay.traces import MAX_TOKEN, TraceError, read, tokens_of
from tests.kinroute.replay.recorded import request, session, write


@pytest.mark.parametrize("name", ["trace.jsonl.gz", "trace.jsonl"])
def test_a_trace_file_is_read_whole(tmp_path: Path, name: str) -> None:
    child = request(2.0, (0, 1), (9, 2), conversation="sub 1", parent="root", kind="sub", stop="end")
    path = write(tmp_path / name, session(request(0.0, (0, 3)), child), session(request(0.0), name="s2"))

    first, second = read(path)

    assert (first.session, first.source, first.block_tokens, second.session) == ("s1", "test", 4, "s2")
    assert [one.t_s for one in first.requests] == [0.0, 2.0]
    assert (first.requests[1].conversation, first.requests[1].parent) == ("sub 1", "root")
    assert (first.requests[1].kind, first.requests[1].stop) == ("sub", "end")
    assert first.requests[1].blocks == ((0, 1), (9, 2))
    assert first.block_bound == 11


@pytest.mark.parametrize("broken", [b"{", b"[]", b'{"session": "a"}'])
def test_what_is_no_session_is_named_by_its_line(tmp_path: Path, broken: bytes) -> None:
    path = write(tmp_path / "trace.jsonl", session(request(0.0)))
    path.write_bytes(path.read_bytes() + broken)

    with pytest.raises(TraceError, match="line 2"):
        read(path)


def test_a_prompt_extends_another_that_ends_with_the_same_block(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.jsonl",
        session(request(0.0, (0, 3)), request(1.0, (0, 2), (2, 5)), request(2.0, (0, 2), (7, 5)), request(3.0, (0, 2))),
    )
    one, grown, edited, shorter = read(path)[0].requests

    assert one.is_extended_by(grown)
    assert not one.is_extended_by(edited)
    assert not one.is_extended_by(shorter)


def test_only_gaps_in_which_nothing_runs_are_cut(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.jsonl",
        session(request(0.0, dur=100.0), request(50.0, dur=1.0), request(105.0), request(500.0), request(501.5)),
    )

    cut = read(path)[0].with_gaps_cut(10.0)

    assert [one.t_s for one in cut.requests] == [0.0, 50.0, 105.0, 116.0, 117.5]
    assert cut.length_s == 118.5


def test_a_block_has_the_same_tokens_wherever_it_stands() -> None:
    prompt, later = tokens_of([(0, 2), (7, 1)], 4), tokens_of([(0, 1), (6, 2)], 4)

    assert prompt.dtype == np.int32
    assert prompt.tolist() == [*range(8), *range(28, 32)]
    assert prompt[:4].tolist() == later[:4].tolist()
    assert prompt[-4:].tolist() == later[-4:].tolist()
    assert len(tokens_of([], 4)) == 0


def test_ids_past_the_last_token_begin_again() -> None:
    most = MAX_TOKEN // 4

    assert tokens_of([(0, 2)], 4, first_id=most - 1).tolist() == [*range(MAX_TOKEN - 4, MAX_TOKEN), 0, 1, 2, 3]
