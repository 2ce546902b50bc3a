"""The key of TensorRT-LLM's hints is read again when it changes, and a wrong file is named at the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configuration.reading import SettingsError
from enginelink.trtllm_affinity import GrpcHint, Presented
from worker.affinity import AffinityHints
from worker.core.types import Phase
from worker.lineage import Lineage
from worker.refusal import Refused

REQUEST: dict[str, Any] = {"request_id": "1", "phase": Phase.CONTEXT, "model": "m", "conversation": "c"}


def presented(key: bytes, parent: str = "p") -> Presented:
    return Presented(parent, GrpcHint("m", "c", parent, "1").sign(key))


def test_a_signed_parent_is_the_family_too(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("first\n")
    hints = AffinityHints(tmp_path / "key")

    assert hints.lineage_of(presented(b"first"), **REQUEST) == Lineage("peer:p", "peer:p")


def test_a_conversation_that_names_itself_has_no_parent(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("first")

    assert AffinityHints(tmp_path / "key").lineage_of(presented(b"first", "c"), **REQUEST) == Lineage()


def test_a_key_that_replaces_the_first_is_taken_without_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("first")
    hints = AffinityHints(file, reread_s=0.0)

    file.write_text("second")

    assert hints.lineage_of(presented(b"second"), **REQUEST).parent == "peer:p"
    with pytest.raises(Refused) as caught:
        hints.lineage_of(presented(b"first"), **REQUEST)
    assert caught.value.is_lineage


def test_a_file_that_cannot_be_read_later_leaves_the_key_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("first")
    hints = AffinityHints(file, reread_s=0.0)
    file.unlink()

    with pytest.raises(Refused):
        hints.lineage_of(presented(b"second"), **REQUEST)
    assert hints.lineage_of(presented(b"first"), **REQUEST).parent == "peer:p"


@pytest.mark.parametrize("content", [None, ""])
def test_a_file_without_a_key_is_named_at_the_start(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_text(content)

    with pytest.raises(SettingsError, match=r"internal_request_auth_key_file is '.*key'"):
        AffinityHints(file)


def test_without_a_key_every_hint_is_refused_and_conversations_keep_their_names() -> None:
    hints = AffinityHints()

    with pytest.raises(Refused, match="no key"):
        hints.lineage_of(presented(b""), **REQUEST)
    assert hints.conversation("c") == "c"
