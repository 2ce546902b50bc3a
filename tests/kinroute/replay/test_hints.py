from __future__ import annotations

import pytest

from kinroute.replay.hints import Hints


def test_hints_are_read_by_name() -> None:
    assert Hints.parse("parent, final") == Hints(parent=True, stop=False, final=True)
    assert Hints.parse("none") == Hints(parent=False, stop=False, final=False)


@pytest.mark.parametrize("text", ["none", "parent,stop", "parent,stop,final", "stop"])
def test_hints_are_written_as_they_are_read(text: str) -> None:
    assert str(Hints.parse(text)) == text


def test_an_unknown_hint_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="parents"):
        Hints.parse("stop,parents")
