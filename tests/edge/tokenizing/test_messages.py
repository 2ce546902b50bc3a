from __future__ import annotations

from typing import Any

import pytest

from edge.core.errors import Code, EdgeError
from edge.tokenizing.messages import TemplateTraits
from edge.tokenizing.template import ChatTemplate
from tests.edge.tokenizing.samples import CHATML, HERMES

PARTS_ONLY = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}|{% endfor %}{% endif %}{% endfor %}"
)
RAW_CALLS = (
    "{{ tools }}{% for m in messages %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}{% endfor %}"
)
NULL_CALLS = (
    "{{ tools }}{% for m in messages %}{{ m.content + '' }}{% for c in m.tool_calls or [] %}{{ c }}{% endfor %}"
    "{% endfor %}"
)


def traits(source: str) -> TemplateTraits:
    return TemplateTraits.of(ChatTemplate(source, {}))


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "read", "arguments": arguments}}


def texts(*contents: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content} for content in contents]


@pytest.mark.parametrize(("source", "supports"), [(CHATML, False), (HERMES, True), (RAW_CALLS, True)])
def test_tools_are_supported_where_they_change_the_prompt(source: str, supports: bool) -> None:
    assert traits(source).supports_tools is supports


def test_parts_become_one_string_for_templates_that_want_strings() -> None:
    assert traits(CHATML).shape([{"role": "user", "content": texts("a", "b")}]) == [{"role": "user", "content": "a\nb"}]


def test_parts_stay_parts_for_templates_that_read_them() -> None:
    message = {"role": "user", "content": texts("a", "b")}

    assert traits(EITHER).shape([message]) == [message]


def test_a_string_becomes_a_part_for_templates_that_read_only_parts() -> None:
    assert traits(PARTS_ONLY).shape([{"role": "user", "content": "a"}]) == [{"role": "user", "content": texts("a")}]
    assert traits(EITHER).shape([{"role": "user", "content": "a"}]) == [{"role": "user", "content": "a"}]


def test_arguments_become_objects_for_templates_that_write_json_themselves() -> None:
    (message,) = traits(HERMES).shape([{"role": "assistant", "content": None, "tool_calls": [call('{"path": "a"}')]}])

    assert message["tool_calls"] == [call({"path": "a"})]


def test_arguments_stay_as_the_model_wrote_them_where_the_template_takes_them_so() -> None:
    (message,) = traits(RAW_CALLS).shape([{"role": "assistant", "content": None, "tool_calls": [call('{"path":"a"}')]}])

    assert message["tool_calls"] == [call('{"path":"a"}')]


def test_missing_content_beside_calls_is_left_out_or_empty_as_the_template_needs() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [call("{}")]}

    assert "content" not in traits(HERMES).shape([message])[0]
    assert traits(NULL_CALLS).shape([message])[0]["content"] == ""


def test_an_empty_list_of_calls_is_no_list() -> None:
    assert traits(HERMES).shape([{"role": "assistant", "content": "a", "tool_calls": []}]) == [
        {"role": "assistant", "content": "a"}
    ]


def test_the_callers_messages_are_not_changed() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [call("{}")]}

    traits(HERMES).shape([message])

    assert message == {"role": "assistant", "content": None, "tool_calls": [call("{}")]}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]"),
        ({"role": "assistant", "tool_calls": [call("{")]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls[0]"),
    ],
)
def test_what_no_template_can_render_is_refused_by_its_place(message: dict[str, Any], param: str) -> None:
    with pytest.raises(EdgeError) as caught:
        traits(HERMES).shape([message])

    assert caught.value.code is Code.INVALID
    assert caught.value.param == param
