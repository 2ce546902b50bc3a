from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from edge.core.errors import Code, EdgeError
from edge.tokenizing.template import ChatTemplate


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages or [], options=options)


def test_json_is_written_as_models_saw_it_in_training() -> None:
    value = {"b": "naïve <tag> & 'x'", "a": [1, None, True]}

    assert render("{{ v | tojson }}", v=value) == json.dumps(value, ensure_ascii=False)
    assert render("{{ v | tojson(indent=2) }}", v=value) == json.dumps(value, ensure_ascii=False, indent=2)


def test_blocks_leave_no_white_space_behind() -> None:
    assert render("  {% if true %}\na\n  {% endif %}\nb") == "a\nb"


def test_loop_controls_and_generation_tags_work() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{% generation %}{{ m }}{% endgeneration %}"
    )

    assert ChatTemplate(source + "{% endfor %}", {}).render([{"a": 1}, {"b": 2}]) == "{'a': 1}"


def test_special_tokens_and_the_callers_options_are_variables() -> None:
    assert render("{{ bos_token }}{{ enable_thinking }}", enable_thinking=False) == "<s>False"


def test_options_do_not_replace_the_messages() -> None:
    template = ChatTemplate("{{ messages | length }}{{ add_generation_prompt }}", {})

    assert template.render([], options={"messages": [1], "add_generation_prompt": None}) == "0True"


def test_the_date_is_the_local_one() -> None:
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.now().year + late) for late in (0, -1)}  # noqa: DTZ005


@pytest.mark.parametrize(
    "source", ["{{ raise_exception('roles must alternate') }}", "{{ messages[0].content + 'roles must' }}"]
)
def test_what_a_template_refuses_is_the_callers_fault(source: str) -> None:
    with pytest.raises(EdgeError) as caught:
        render(source)

    assert caught.value.code is Code.INVALID
    assert caught.value.param == "messages"


def test_the_reason_a_template_gives_reaches_the_caller() -> None:
    with pytest.raises(EdgeError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ raise_exception.__globals__ }}"]
)
def test_a_template_can_neither_change_its_values_nor_leave_its_sandbox(source: str) -> None:
    with pytest.raises(EdgeError):
        render(source + "{{ messages[0].x }}")


def test_a_source_that_is_no_template_is_refused_with_its_line() -> None:
    with pytest.raises(ValueError, match="line 2"):
        ChatTemplate("a\n{% if %}", {})
