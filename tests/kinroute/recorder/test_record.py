"""`kinroute record` as a process: real edges, a fake worker, the `openai` client, and the trace that comes of it."""

from __future__ import annotations

import contextlib
import gzip
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from kinroute.__main__ import main
from kinroute.replay.readers import read_sessions
from kinroute.replay.traces import Session
from openengine.v1 import generation_pb2
from tests.edge.grpc.harness import Client, request
from tests.edge.http.harness import KEY, OPERATOR_KEY, make_text_folder, served
from tests.edge.test_app import Edge, edge_of, heard, running

WAIT_S = 20.0
PROMPT = "You are a careful agent with a long prompt of many words. " * 4
NAMES = ("planner-4711", "helper-0815")
SECRETS = (*NAMES, "careful", "default", "local")


@pytest.fixture(scope="module")
def worker() -> Iterator[str]:
    with running("bench.fake_worker", "--step-ms", "1") as process:
        yield str(heard(process)["grpc"])


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory, worker: str) -> Iterator[Edge]:
    listen = {"http": "127.0.0.1:0", "admin": "127.0.0.1:0", "grpc": "127.0.0.1:0"}
    with edge_of(tmp_path_factory.mktemp("edge"), [worker], [worker], listen=listen) as running_edge:
        assert heard(running_edge.process) == {"event": "ready"}
        yield running_edge


class Recorder:
    """`kinroute record OUT …`, as a process. Wait until it follows before traffic is sent."""

    def __init__(self, process: subprocess.Popen[str], out: Path) -> None:
        self.process = process
        self.out = out

    def next_line(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.readline()

    def ended(self) -> tuple[int, str]:
        """Its exit code and what it said."""
        said = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, "".join(said)

    def sessions(self) -> list[Session]:
        code, said = self.ended()
        assert code == 0, said
        return read_sessions([self.out])


@contextmanager
def recorder(edges: list[Edge], out: Path, *arguments: str) -> Iterator[Recorder]:
    urls = [part for edge in edges for part in ("--url", edge.admin)]
    command = [sys.executable, "-m", "kinroute", "record", str(out), *urls, "--block-tokens", "8", *arguments]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        recording = Recorder(process, out)
        for _ in edges:
            line = recording.next_line()
            assert "is followed" in line, line
        yield recording
    finally:
        process.kill()
        process.communicate()


def ask(client: openai.OpenAI, text: str, own: str, parent: str = "") -> None:
    headers = {"X-Kinroute-Conversation-ID": own} | ({"X-Kinroute-Parent-ID": parent} if parent else {})
    client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": text}], max_tokens=4, extra_headers=headers
    )


def stop(edge: Edge) -> None:
    edge.process.send_signal(signal.SIGTERM)
    assert edge.process.wait(WAIT_S) == 0


def family(client: openai.OpenAI, count: int) -> None:
    """A parent, its sub-agent, and the parent again and again: `count` requests."""
    planner, helper = NAMES
    ask(client, PROMPT, planner)
    ask(client, PROMPT + "Help!", helper, planner)
    for number in range(count - 2):
        ask(client, PROMPT + "And then? " * number, planner)


def test_a_family_is_recorded_without_its_words_and_can_be_replayed(
    tmp_path: Path, edge: Edge, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "live.jsonl.gz"
    with recorder([edge], out, "--requests", "10") as recording:
        family(edge.openai(), 10)
        (session,) = recording.sessions()

    assert (session.source, session.block_tokens, len(session.requests)) == ("recorded", 8, 10)
    root, child, *rest = session.requests
    assert (root.conversation, root.kind, root.parent) == ("c0", "root", None)
    assert (child.conversation, child.kind, child.parent) == ("c1", "sub", "c0")
    assert {one.conversation for one in rest} == {"c0"}
    assert all((one.output_tokens, one.stop) == (4, None) for one in session.requests)
    assert root.num_blocks > 20
    assert [one.blocks[0][0] for one in session.requests] == [0] * 10, "all begin alike"
    written = gzip.decompress(out.read_bytes()).decode()
    assert not [secret for secret in SECRETS if secret in written]
    assert list(tmp_path.iterdir()) == [out]
    replay = ["replay", str(out), "--requests", "10", "--lanes", "1", "--capacity", "400", "--policy", "lru"]
    assert main([*replay, "--json", "-"]) == 0
    assert '"block_hit_ratio"' in capsys.readouterr().out


def test_several_edges_are_recorded_as_one_past_a_restart_until_ctrl_c(tmp_path: Path, edge: Edge, worker: str) -> None:
    keys = Path(edge.keys_file)
    more = {"keys_file": str(keys)}
    with contextlib.ExitStack() as recorded:
        with edge_of(tmp_path, [worker], [worker], **more) as leaves:
            assert heard(leaves.process) == {"event": "ready"}
            recording = recorded.enter_context(recorder([edge, leaves], tmp_path / "live.jsonl"))
            ask(leaves.openai(), PROMPT, "planner")
            stop(leaves)
        assert f"{leaves.admin} is away (it stops)" in recording.next_line()
        ask(edge.openai(), PROMPT + "Help!", "helper", "planner")
        listen = {"http": "127.0.0.1:0", "admin": leaves.admin.removeprefix("http://")}
        with edge_of(tmp_path, [worker], [worker], listen=listen, **more) as back:
            assert heard(back.process) == {"event": "ready"}
            assert f"{leaves.admin} is back" in recording.next_line()
            ask(back.openai(), PROMPT + "Again.", "planner")
            stop(back)
        assert "is away" in recording.next_line(), "so all was told"
        recording.process.send_signal(signal.SIGINT)
        (session,) = recording.sessions()

    assert [(one.conversation, one.parent) for one in session.requests] == [("c0", None), ("c1", "c0"), ("c0", None)]
    assert [one.blocks[0][0] for one in session.requests] == [0, 0, 0], "edges tell a block alike"


def test_legs_that_an_orchestrator_drives_are_one_request(tmp_path: Path, edge: Edge) -> None:
    with (
        Client(edge.grpc, edge.key) as client,
        recorder([edge], tmp_path / "live.jsonl", "--requests", "3") as recording,
    ):
        (ready,) = client.answer(request("A long prompt", 6, extra={"request_type": "context_only"}))
        session = ready.prefill_ready.kv_session
        client.answer(request("A long prompt", 6, kv=generation_pb2.KvOptions(session=session)))
        client.answer(request("Another prompt", 6))
        client.answer(request("The last prompt", 6))
        sessions = recording.sessions()

    told = [(one.output_tokens, one.num_blocks) for session in sessions for one in session.requests]
    assert told == [(6, 1), (6, 1), (6, 1)]


def test_what_cannot_be_recorded_is_said_in_a_line(
    tmp_path: Path, edge: Edge, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: str) -> str:
        assert main(["record", *arguments]) == 1
        return capsys.readouterr().err.splitlines()[-1]

    out, nobody = str(tmp_path / "live.jsonl"), "http://127.0.0.1:9"
    assert "does not answer" in refused(out, "--url", nobody)
    assert "cannot be written" in refused(str(tmp_path / "none" / "x"), "--url", nobody)
    assert "no key that can be read" in refused(out, "--url", nobody, "--key-file", out)
    assert "it has no recordings" in refused(out, "--url", edge.url)
    assert "no request ended" in refused(out, "--url", edge.admin, "--seconds", "0.2")
    with pytest.raises(SystemExit):
        main(["record", out, "--url", "127.0.0.1:9"])
    assert "must be http://HOST:PORT" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_where_others_reach_the_listener_only_an_operator_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(make_text_folder(tmp_path / "text"), admin_guarded=True) as guarded:
        for key, told in (("", "wants a key"), (KEY, "needs the scope operator"), (OPERATOR_KEY, "no request ended")):
            (tmp_path / "key").write_text(key or "wrong")
            asked = ["record", str(tmp_path / "x"), "--url", guarded.admin_url, "--seconds", "0.2"]
            assert main([*asked, "--key-file", str(tmp_path / "key")]) == 1
            assert told in capsys.readouterr().err
