"""Which headers say whose conversation a request is. The first family that is present wins; later ones are not read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from edge.core.errors import Code, EdgeError

MAX_ID_BYTES = 256
MAX_TOKEN_BYTES = 2048
LINEAGE_HEADER = "x-kinroute-lineage"
CODEX_SIDE_TASKS = {"compact", "memory_consolidation", "review"}
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_INTERNAL = re.compile(r"^(x-trtllm-|openengine-|x-kinroute-internal-)|^kinroute-lineage$")


@dataclass(frozen=True, slots=True)
class Claim:
    """What the caller says, in its own words, unproven. `root`: the family's first conversation, where it is carried.

    `explicit`: said in our own headers, so it is refused where it may not be believed; an agent's are ignored instead.
    """

    family: str = ""
    conversation: str | None = None
    parent: str | None = None
    root: str | None = None
    final: bool = False
    side: bool = False
    explicit: bool = False
    placement: str | None = None


@dataclass(frozen=True, slots=True)
class HeaderNames:
    """Every name that the families read; each can be changed by configuration. In lower case, with dashes."""

    ours: tuple[str, str, str] = (
        "x-kinroute-conversation-id",
        "x-kinroute-parent-id",
        "x-kinroute-conversation-final",
    )
    dynamo: tuple[str, str, str] = ("x-dynamo-session-id", "x-dynamo-parent-session-id", "x-dynamo-session-final")
    claude_code: tuple[str, str, str] = (
        "x-claude-code-session-id",
        "x-claude-code-agent-id",
        "x-claude-code-parent-agent-id",
    )
    codex: tuple[str, str, str, str] = ("thread-id", "session-id", "x-codex-parent-thread-id", "x-openai-subagent")
    opencode: tuple[tuple[str, ...], str] = (
        ("x-opencode-session", "x-session-id", "x-session-affinity"),
        "x-parent-session-id",
    )
    others: tuple[str, ...] = ("x-litellm-session-id", "x-session-id", "x-multi-turn-session-id")
    others_parent: str = ""


Values = Mapping[str, str]


def fold(raw: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Names in lower case with dashes, values trimmed, blank ones absent, internal ones dropped in every spelling.

    Raises EdgeError where one name has two values.
    """
    folded: dict[str, str] = {}
    for name, value in raw:
        key = name.lower().replace("_", "-")
        trimmed = value.strip()
        if not trimmed or _INTERNAL.search(key):
            continue
        if folded.setdefault(key, trimmed) != trimmed and _is_ours_to_read(key):
            raise EdgeError(Code.INVALID, f"The header {key} is given twice with different values.", param=key)
    return folded


def _is_ours_to_read(key: str) -> bool:
    return key.startswith("x-") or key in ("thread-id", "session-id")


@dataclass(frozen=True, slots=True)
class HeaderFamilies:
    """Reads a claim out of folded headers (`fold`) and a body's own fields."""

    names: HeaderNames = field(default_factory=HeaderNames)

    def read(self, headers: Values, *, body_conversation: str | None = None, cache_key: str | None = None) -> Claim:
        """Raises EdgeError: an id that is too long, has control characters, or contradicts another."""
        readers: Sequence[Callable[[Values], Claim | None]] = (
            self._ours,
            self._dynamo,
            self._claude_code,
            self._codex,
            self._opencode,
        )
        for reader in readers:
            claim = reader(headers)
            if claim is not None:
                return claim
        return self._others(headers, body_conversation, cache_key)

    def _ours(self, headers: Values) -> Claim | None:
        own, parent, final = self.names.ours
        token = _value(headers, LINEAGE_HEADER, MAX_TOKEN_BYTES)
        if not (own in headers or parent in headers or final in headers or token):
            return None
        if token is not None:
            raise EdgeError(
                Code.NOT_IMPLEMENTED,
                f"Lineage tokens are not taken yet: name the parent in {parent}.",
                param=LINEAGE_HEADER,
            )
        return Claim(
            family="kinroute",
            conversation=_value(headers, own),
            parent=_value(headers, parent),
            final=_flag(headers, final),
            explicit=True,
        )

    def _dynamo(self, headers: Values) -> Claim | None:
        own, parent, final = self.names.dynamo
        if not (own in headers or parent in headers):
            return None
        return Claim("dynamo", _value(headers, own), _value(headers, parent), final=_flag(headers, final))

    def _claude_code(self, headers: Values) -> Claim | None:
        """Children share their root's session id, so an agent's conversation is session and agent together."""
        session_name, agent_name, parent_name = self.names.claude_code
        session = _value(headers, session_name)
        if session is None:
            return None
        agent, parent = _value(headers, agent_name), _value(headers, parent_name)
        if agent is None:
            return Claim("claude-code", session, root=session)
        return Claim(
            "claude-code",
            conversation=f"{session}/{agent}",
            parent=session if parent is None else f"{session}/{parent}",
            root=session,
        )

    def _codex(self, headers: Values) -> Claim | None:
        thread, session, parent_name, kind_name = self.names.codex
        own = _value(headers, thread) or _value(headers, session)
        parent, kind = _value(headers, parent_name), _value(headers, kind_name)
        if own is None and parent is None:
            return None
        if kind in CODEX_SIDE_TASKS:
            return Claim("codex", own, side=True, placement=parent)
        return Claim("codex", own, parent)

    def _opencode(self, headers: Values) -> Claim | None:
        names, parent_name = self.names.opencode
        parent = _value(headers, parent_name)
        if parent is None and names[0] not in headers and names[2] not in headers:
            return None
        return Claim("opencode", _agreeing(headers, names), parent)

    def _others(self, headers: Values, body_conversation: str | None, cache_key: str | None) -> Claim:
        own = body_conversation if body_conversation is not None else _agreeing(headers, self.names.others)
        parent = _value(headers, self.names.others_parent) if self.names.others_parent else None
        if body_conversation is not None:
            _require_id("conversation_params.conversation_id", body_conversation, MAX_ID_BYTES)
        if cache_key is not None:
            _require_id("prompt_cache_key", cache_key, MAX_ID_BYTES)
        family = "other" if own is not None or parent is not None else ""
        return Claim(family, own or None, parent, placement=cache_key)


def _value(headers: Values, name: str, max_bytes: int = MAX_ID_BYTES) -> str | None:
    value = headers.get(name)
    if value is not None:
        _require_id(name, value, max_bytes)
    return value


def _agreeing(headers: Values, names: Sequence[str]) -> str | None:
    """The value that all of `names` that are present have. Raises EdgeError where they differ."""
    found = {name: value for name in names if (value := _value(headers, name)) is not None}
    if len(set(found.values())) > 1:
        raise EdgeError(Code.INVALID, f"{' and '.join(found)} name different conversations.", param=next(iter(found)))
    return next(iter(found.values()), None)


def _flag(headers: Values, name: str) -> bool:
    value = headers.get(name, "false").lower()
    if value not in ("true", "false"):
        raise EdgeError(Code.INVALID, f"{name} must be true or false.", param=name)
    return value == "true"


def _require_id(name: str, value: str, max_bytes: int) -> None:
    if len(value.encode(errors="surrogateescape")) > max_bytes:
        raise EdgeError(Code.INVALID, f"{name} is longer than {max_bytes} bytes.", param=name)
    if _CONTROL.search(value):
        raise EdgeError(Code.INVALID, f"{name} has control characters.", param=name)
