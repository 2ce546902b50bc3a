"""Every format is read, and nothing that is no trace is taken for one."""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kinroute.replay.readers import read_sessions
from kinroute.replay.traces import Session, TraceError
from tests.kinroute.replay.recorded import request, session


def ours() -> list[dict[str, Any]]:
    child = request(2.0, (0, 1), (9, 2), conversation="sub 1", parent="root", kind="sub", stop="end")
    return [
        session(request(0.0, (0, 3)), child, request(3.0, (0, 3), (3, 2))),
        session(request(0.0, (0, 1)), name="s2"),
    ]


def call(t: float, *ids: int, stop: str = "tool_use", **members: Any) -> dict[str, Any]:
    return {
        "t": t,
        "type": "s",
        "in": 4 * len(ids) + 1,
        "out": 8,
        "hash_ids": ids,
        "stop": stop,
        "api_time": 1.5,
    } | members


def session_file(**members: Any) -> dict[str, Any]:
    inner = {"type": "subagent", "t": 1.0, "agent_id": "deep", "status": "async_launched", "requests": [call(0.0, 7)]}
    helper = {"type": "subagent", "t": 9.0, "duration_ms": 5000, "status": "completed", "agent_id": "a"}
    helper["requests"] = [call(0.0, 1, 5), inner, call(2.0, 1, 5, 6, stop="end_turn")]
    calls = [call(0.0, 1, 2), call(2.0, 1, 2, 3), helper, call(10.0, 1, 2, 3, 4, stop="", api_time=None)]
    return {"id": "trace_1", "block_size": 4, "hash_id_scope": "local", "requests": calls} | members


def row(timestamp: float | None, *ids: int, block: int = 512, output: int = 100, **members: Any) -> dict[str, Any]:
    made = {} if timestamp is None else {"timestamp": timestamp}
    return made | {"input_length": block * len(ids) - 1, "output_length": output, "hash_ids": ids} | members


def mooncake() -> list[dict[str, Any]]:
    return [row(0, 0, 1, 2, 3), row(500, 0, 9, 10), row(3000, 0, 1, 2, 11, 12), row(4000, 0, 1, 20)]


def aiperf() -> list[dict[str, Any]]:
    timed: dict[str, Any] = {"session_id": "a", "block_size": 16}
    return [
        row(0, 1, 2, block=16, **timed),
        row(100, 1, 5, block=16, session_id="b"),
        row(None, 1, 2, 3, block=16, delay=2000, session_id="a"),
        row(9000, 1, 5, 6, block=16, session_id="b"),
    ]


FILES: dict[str, Sequence[dict[str, Any]]] = {
    "ours": ours(), "kv-cache-tester": [session_file()], "mooncake": mooncake(), "aiperf": aiperf()
}  # fmt: skip


def write(file: Path, lines: Sequence[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file.write_bytes(gzip.compress(text, mtime=0) if file.suffix == ".gz" else text)
    return file


def told(sessions: Sequence[Session]) -> list[tuple[str, float, str, str | None, str | None, Any]]:
    calls = [one for each in sessions for one in each.requests]
    return [(one.kind, one.t_s, one.conversation, one.parent, one.stop, one.blocks) for one in calls]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_every_format_is_told_from_its_content(tmp_path: Path, name: str, suffix: str) -> None:
    plain = read_sessions([write(tmp_path / f"x.{suffix}", FILES[name])])

    assert plain
    assert plain == read_sessions([write(tmp_path / "other.suffix", FILES[name])]) or name in ("mooncake", "aiperf")


def test_a_sub_agent_that_completed_began_its_duration_before_its_entrys_time(tmp_path: Path) -> None:
    (read,) = read_sessions([write(tmp_path / "one.json", [session_file()])])

    assert (read.session, read.source, read.block_tokens) == ("trace_1", "kv-cache-tester", 4)
    assert told([read]) == [
        ("root", 0.0, "root", None, "tool", ((0, 2),)),
        ("root", 2.0, "root", None, "tool", ((0, 3),)),
        ("sub", 4.0, "a", "root", "tool", ((0, 1), (3, 1))),
        ("sub", 5.0, "a/deep", "a", "tool", ((4, 1),)),
        ("sub", 6.0, "a", "root", "end", ((0, 1), (3, 1), (5, 1))),
        ("root", 10.0, "root", None, None, ((0, 3), (6, 1))),
    ]
    assert [one.duration_s for one in read.requests] == [1.5] * 5 + [1.0 + 0.03 * 8]


def test_a_session_file_may_be_written_over_many_lines(tmp_path: Path) -> None:
    (tmp_path / "wide.json").write_text(json.dumps(session_file(), indent=1))

    assert read_sessions([tmp_path / "wide.json"]) == read_sessions([write(tmp_path / "one.json", [session_file()])])


def test_prompts_without_ids_share_nothing(tmp_path: Path) -> None:
    without: dict[str, Any] = {"in": 9}
    made = session_file(requests=[call(0.0, 1, 2), call(1.0, **without), call(2.0, **without)])

    assert [one[-1] for one in told(read_sessions([write(tmp_path / "x", [made])]))] == [
        ((0, 2),),
        ((2, 2),),
        ((4, 2),),
    ]


def test_mooncakes_conversations_go_on_where_a_prompt_extends_anothers_full_blocks(tmp_path: Path) -> None:
    (read,) = read_sessions([write(tmp_path / "chat.jsonl", mooncake())])

    assert (read.session, read.source, read.block_tokens) == ("chat", "mooncake", 512)
    assert [(one.t_s, one.conversation) for one in read.requests] == [
        (0.0, "c1"),
        (0.5, "c2"),
        (3.0, "c1"),
        (4.0, "c4"),
    ]
    assert read.requests[2].blocks == ((0, 3), (6, 2))


def test_sessions_with_times_are_one_of_ours_so_that_they_share_what_they_shared(tmp_path: Path) -> None:
    (read,) = read_sessions([write(tmp_path / "x.jsonl", aiperf())])

    assert read.block_tokens == 16
    assert [(one.t_s, one.conversation, one.blocks) for one in read.requests] == [
        (0.0, "a", ((0, 2),)),
        (0.1, "b", ((0, 1), (3, 1))),
        (0.0 + 4.0 + 2.0, "a", ((0, 3),)),
        (9.0, "b", ((0, 1), (3, 2))),
    ]


def test_sessions_without_times_are_sessions_of_ours(tmp_path: Path) -> None:
    rows = [row(None, 1, 2, session_id="a"), row(None, 1, 2, session_id="b")]

    read = read_sessions([write(tmp_path / "x.jsonl", rows)])

    assert [(one.session, one.requests[0].blocks) for one in read] == [("a", ((0, 2),)), ("b", ((0, 2),))]


def test_rows_that_repeat_nothing_hold_what_is_new_behind_the_answer(tmp_path: Path) -> None:
    rows = [row(None, 1, 2, session_id="a", output=1024), row(None, 3, session_id="a"), row(None, 4, session_id="a")]

    (read,) = read_sessions([write(tmp_path / "x.jsonl", rows)])

    assert [one.num_blocks for one in read.requests] == [2, 2 + 2 + 1, 5 + 1]
    assert all(one.is_extended_by(later) for one, later in zip(read.requests, read.requests[1:], strict=False))


def test_the_size_of_blocks_is_the_one_that_fits_every_length(tmp_path: Path) -> None:
    odd = write(tmp_path / "x.jsonl", [row(0, 1, 2, 3, block=64), row(1, 1, block=64)])

    assert read_sessions([odd])[0].block_tokens == 64
    with pytest.raises(TraceError, match=r"line 1: expected hash_ids for 191 tokens in blocks of 32, not 3"):
        read_sessions([odd], block_tokens=32)


def test_a_block_has_another_id_behind_another_beginning(tmp_path: Path) -> None:
    rows = [row(0, 0, 1, 2), row(1, 0, 3, 4), row(2, 1, 4), row(3, 0, 1, 4), row(4, 0, 1)]

    read = read_sessions([write(tmp_path / "x.jsonl", rows)])[0]

    assert [one.blocks for one in read.requests] == [
        ((0, 3),), ((0, 1), (3, 2)), ((5, 2),), ((0, 2), (7, 1)), ((0, 2),)
    ]  # fmt: skip


def test_a_folders_files_are_read_by_name(tmp_path: Path) -> None:
    for name in ("b.json", "a.json"):
        write(tmp_path / name, [session_file(id=name)])
    (tmp_path / "README.md").write_text("no trace")

    assert [one.session for one in read_sessions([tmp_path])] == ["a.json", "b.json"]


Change = Callable[[list[dict[str, Any]]], Any]


def _of(index: int, path: Sequence[str | int], value: Any) -> Change:
    def change(lines: list[dict[str, Any]]) -> None:
        at: Any = lines[index]
        for step in path[:-1]:
            at = at[step]
        if value is None:
            del at[path[-1]]
        else:
            at[path[-1]] = value

    return change


DAMAGE: list[tuple[str, Change, int, str]] = [
    ("ours", _of(0, ["requests", 1, "t"], -1.0), 1, "a time from 0 on, not -1.0, in request 2"),
    ("ours", _of(0, ["requests", 2, "t"], 1.0), 1, "requests by arrival, but 1.0 s comes after 2.0 s"),
    ("ours", _of(0, ["requests", 1, "dur"], -2), 1, "a duration from 0 on"),
    ("ours", _of(0, ["requests", 1, "dur"], 1e999), 1, "an object of JSON"),
    ("ours", _of(0, ["requests", 0, "blocks"], [[0, 0]]), 1, r"count from 1 on\], not \[0, 0\]"),
    ("ours", _of(0, ["requests", 0, "blocks"], [[-1, 2]]), 1, "first id from 0 on"),
    ("ours", _of(0, ["requests", 0, "blocks"], [[0, 2**40]]), 1, "a prompt of at most"),
    ("ours", _of(0, ["requests", 2, "blocks"], [[0, 2], [9, 1]]), 1, "chained block ids, but block 9 follows block 0"),
    ("ours", _of(0, ["requests", 1, "parent"], "who"), 1, "a conversation of the session, not 'who'"),
    ("ours", _of(0, ["requests", 1, "parent"], "sub 1"), 1, "among its own ancestors, but 'sub 1' is"),
    ("ours", _of(0, ["requests", 0, "parent"], "sub 1"), 1, "a root without a parent"),
    ("ours", _of(1, ["requests", 0, "output_tokens"], -1), 2, "output_tokens from 0 on"),
    ("ours", _of(1, ["requests", 0, "kind"], "child"), 2, "a request of a session"),
    ("ours", _of(1, ["requests", 0, "t"], None), 2, "missing required field 't'"),
    ("ours", _of(1, ["requests"], []), 2, "a session with requests"),
    ("ours", _of(1, ["block_tokens"], 0), 2, "block_tokens of 1 or more"),
    ("ours", _of(1, ["block_tokens"], None), 2, "missing required field 'block_tokens'"),
    ("kv-cache-tester", _of(0, ["requests", 1, "t"], -3), 1, "a time from 0 on"),
    ("kv-cache-tester", _of(0, ["requests", 0, "t"], 3), 1, "by arrival, but 2.0 s comes after 3.0 s"),
    ("kv-cache-tester", _of(0, ["requests", 2, "duration_ms"], 90_000), 1, "a duration that fits its end at 9.0 s"),
    ("kv-cache-tester", _of(0, ["requests", 2, "requests", 0, "in"], None), 1, "missing required field 'in'"),
    ("kv-cache-tester", _of(0, ["requests", 2, "agent_id"], None), 1, "missing required field 'agent_id'"),
    ("kv-cache-tester", _of(0, ["requests", 0, "hash_ids"], [-1]), 1, "hash_ids from 0 on"),
    ("kv-cache-tester", _of(0, ["block_size"], 0), 1, "a block_size from 1 on"),
    ("kv-cache-tester", _of(0, ["requests"], []), 1, "a session with requests"),
    ("mooncake", _of(2, ["timestamp"], 400), 3, "rows by arrival, but 0.4 s comes after 0.5 s"),
    ("mooncake", _of(2, ["timestamp"], -1), 3, "timestamp from 0 on"),
    ("mooncake", _of(2, ["timestamp"], None), 3, "a timestamp"),
    ("mooncake", _of(2, ["hash_ids"], None), 3, "missing required field 'hash_ids'"),
    ("mooncake", _of(2, ["hash_ids"], [0, 1]), 3, "hash_ids for 2559 tokens"),
    ("mooncake", _of(2, ["input_length"], None), 3, "input_length from 0 on, not None"),
    ("mooncake", _of(2, ["output_length"], -1), 3, "output_length from 0 on"),
    ("mooncake", _of(2, ["session_id"], "x"), 3, "no session_id"),
    ("aiperf", _of(2, ["session_id"], None), 3, "a session_id"),
    ("aiperf", _of(2, ["delay"], -1), 3, "delay from 0 on"),
    ("aiperf", _of(2, ["timestamp"], 5), 3, "a timestamp or a delay, not both"),
    ("aiperf", _of(3, ["timestamp"], 50), 4, "rows by arrival"),
    ("aiperf", _of(1, ["timestamp"], None), 2, "a timestamp in the first row of every session"),
    ("aiperf", _of(1, ["block_size"], 32), 2, "in blocks of another size"),
]


@pytest.mark.parametrize(("name", "change", "line", "expected"), DAMAGE)
def test_damage_is_named_by_file_line_and_what_was_expected(
    tmp_path: Path, name: str, change: Change, line: int, expected: str
) -> None:
    lines = json.loads(json.dumps(FILES[name]))
    change(lines)
    file = write(tmp_path / "bad.jsonl", lines)

    with pytest.raises(TraceError, match=expected) as raised:
        read_sessions([file])
    assert (raised.value.file, raised.value.line) == (file, line)
    assert str(raised.value).startswith(f"{file}, line {line}: expected ")


def test_a_wide_session_file_names_the_line_of_the_request(tmp_path: Path) -> None:
    made = session_file()
    made["requests"][2]["requests"][0]["out"] = "many"
    text = json.dumps(made, indent=1)
    (tmp_path / "wide.json").write_text(text)

    with pytest.raises(TraceError, match="a request or a sub-agent") as raised:
        read_sessions([tmp_path / "wide.json"])
    begins = text.split('"many"')[0].rindex("{")
    assert raised.value.line == text.count("\n", 0, begins) + 1


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "a trace, but the file is empty"),
        (b" \n\n", "something else"),
        (b"\x00\x01\x02", "something else"),
        (b"\x89PNG\r\n\x1a\n\x00", "something else"),
        (b"t,in,out\n0,1,2\n", "something else"),
        (b"[1, 2]\n", "an object of JSON on one line"),
        (b'{"t": \n', "an object of JSON on one line"),
        (b'{"name": "Ada"}\n', "a trace: sessions of ours"),
        (b'{"chat_id": 1, "timestamp": 0.0}\n', "a trace: sessions of ours"),
        (b'{"schema": "dynamo.agentic_mooncake", "version": 2}\n', "a trace: sessions of ours"),
        (b"\x1f\x8bnot gzip at all", "gzip data that is whole"),
        (b'{\n "id": "x",\n "block_size": 4,\n "requests": [\n', "a session"),
        (b'{"session": "\xff", "block_tokens": 4, "requests": []}\n', "a session"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "other").write_bytes(content)

    with pytest.raises(TraceError, match=expected):
        read_sessions([tmp_path / "other"])


def test_an_empty_folder_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="files of traces in this folder"):
        read_sessions([tmp_path])


def _read(content: bytes, folder: Path) -> list[Session]:
    file = folder / "x.jsonl"
    file.write_bytes(content)
    return read_sessions([file])


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_file_that_ends_early_is_refused_or_ends_between_lines(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp()
    text = "".join(json.dumps(line) + "\n" for line in FILES[name]).encode()
    zipped = gzip.compress(text, mtime=0)
    cut = data.draw(st.integers(0, len(text) - 2))
    try:
        read = told(_read(text[:cut], folder))
    except TraceError:
        read = []
    whole_lines = text[:cut].count(b"\n") + (text[cut : cut + 1] == b"\n")
    if read:
        assert read == told(_read("".join(text.decode().splitlines(True)[:whole_lines]).encode(), folder))
    with pytest.raises(TraceError):
        _read(zipped[: data.draw(st.integers(0, len(zipped) - 1))], folder)


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_changed_bytes_give_a_trace_or_an_error_that_says_where(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp()
    text = bytearray("".join(json.dumps(line) + "\n" for line in FILES[name]).encode())
    zipped = bytearray(gzip.compress(bytes(text), mtime=0))
    right = told(_read(bytes(text), folder))
    at = data.draw(st.integers(10, len(zipped) - 1))
    zipped[at] ^= data.draw(st.integers(1, 255))
    for _ in range(data.draw(st.integers(1, 3))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.sampled_from(b'0123456789{}[]",:-.e\n\0 \xff'))
    with contextlib.suppress(TraceError):
        _read(bytes(text), folder)
    # A gzip file has a checksum: it is refused, or what it holds is what it held.
    with contextlib.suppress(TraceError):
        assert told(_read(bytes(zipped), folder)) == right


def test_lines_out_of_order_are_never_another_load(tmp_path: Path) -> None:
    lines = mooncake()
    right = told(read_sessions([write(tmp_path / "x.jsonl", lines)]))
    for seed in range(20):
        shuffled = random.Random(seed).sample(lines, len(lines))
        if shuffled != lines:
            with pytest.raises(TraceError, match="rows by arrival"):
                read_sessions([write(tmp_path / "x.jsonl", shuffled)])
    assert told(read_sessions([write(tmp_path / "x.jsonl", lines)])) == right


def test_a_long_conversation_takes_no_more_memory_than_its_file(tmp_path: Path) -> None:
    """Each prompt repeats the last one and adds a block: the file grows with the square of what is new."""
    file = tmp_path / "long.jsonl"
    with file.open("w") as out:
        for turn in range(1, 700):
            out.write(json.dumps(row(turn, *range(turn), block=512)) + "\n")

    tracemalloc.start()
    try:
        (read,) = read_sessions([file])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert len(read.requests) == 699
    assert peak < 4 * file.stat().st_size
