"""A model's chat template, rendered as Hugging Face's `apply_chat_template` renders it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from edge.core.errors import Code, EdgeError


class ChatTemplate:
    """A compiled template in a sandbox whose values cannot be changed by it.

    `special_tokens`: the names templates use for the tokenizer's own tokens (`bos_token`, `eos_token`, ...).
    Raises ValueError if the source is not a template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template does not compile, line {error.lineno}: {error.message}") from error
        # A rendering copies the globals; copying jinja2's chain of mappings is a third of what a short one costs.
        self._template.globals = dict(self._template.globals)
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. `options` are the template's own variables, such as `enable_thinking`.

        Raises EdgeError (INVALID, `messages`) where the template refuses them or cannot make sense of them.
        """
        variables: dict[str, Any] = {**self._special_tokens, **(options or {})}
        variables.update(messages=messages, tools=tools or None, documents=None)
        variables["add_generation_prompt"] = add_generation_prompt
        try:
            return self._template.render(variables)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            reason = str(error) or type(error).__name__
            raise EdgeError(
                Code.INVALID, f"The model's chat template refuses these messages: {reason}", param="messages"
            ) from error


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what a model wrote, for training; here its body is all that counts."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a plain set

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML's escapes, which jinja2's own filter would put into the prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # noqa: DTZ005 - templates mean the local date
