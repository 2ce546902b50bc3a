"""Which headers say whose conversation a request is. The first family that is present wins; later ones are not read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from edge.core.errors import Code, EdgeError
from edge.core.lineage_token import MAX_TOKEN_BYTES

MAX_ID_BYTES = 256
EXTRA_CONVERSATION = "extra.conversation_id"
CODEX_SIDE_TASKS = {"compact", "memory_consolidation", "review"}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_AGAIN = "\n"
"""Between the values of a header that was given more than once; no header can carry it."""
_INTERNAL = re.compile(r"x-trtllm-|openengine-|x-kinroute-internal-|kinroute-lineage$")


@dataclass(frozen=True, slots=True)
class Claim:
    """What the caller says, in its own words, unproven. `root`: the family's first conversation, where it is carried.

    `explicit`: said in our own headers, so it is refused where it may not be believed; an agent's are ignored instead.
    `placement`: what the request should be near, without being its child. `token`: a lineage token, whichever family
    names the conversation; always explicit.
    """

    family: str = ""
    conversation: str | None = None
    parent: str | None = None
    root: str | None = None
    final: bool = False
    side: bool = False
    explicit: bool = False
    placement: str | None = None
    token: str | None = None


@dataclass(frozen=True, slots=True)
class HeaderNames:
    """Every name that the families read, in lower case with dashes; configuration can change each. An empty one is
    never read."""

    conversation: str = "x-kinroute-conversation-id"
    parent: str = "x-kinroute-parent-id"
    final: str = "x-kinroute-conversation-final"
    lineage: str = "x-kinroute-lineage"
    dynamo_session: str = "x-dynamo-session-id"
    dynamo_parent: str = "x-dynamo-parent-session-id"
    dynamo_final: str = "x-dynamo-session-final"
    claude_code_session: str = "x-claude-code-session-id"
    claude_code_agent: str = "x-claude-code-agent-id"
    claude_code_parent_agent: str = "x-claude-code-parent-agent-id"
    codex_thread: str = "thread-id"
    codex_session: str = "session-id"
    codex_parent: str = "x-codex-parent-thread-id"
    codex_kind: str = "x-openai-subagent"
    opencode_session: str = "x-opencode-session"
    opencode_id: str = "x-session-id"
    opencode_affinity: str = "x-session-affinity"
    opencode_parent: str = "x-parent-session-id"
    others: tuple[str, ...] = ("x-litellm-session-id", "x-session-id", "x-multi-turn-session-id")
    others_parent: str = ""


def naming(claim: Claim, own: str, parent: str = "") -> Claim:
    """The claim of a request whose own id stands in OpenEngine's `extra` too, or instead, and whose parent is named in
    another dialect. Raises EdgeError where its metadata say otherwise."""
    own = own.strip(" \t")
    if own:
        _require_id(EXTRA_CONVERSATION, own, MAX_ID_BYTES)
        if claim.conversation is not None and claim.conversation != own:
            raise EdgeError(
                Code.INVALID,
                f"{EXTRA_CONVERSATION} and the metadata name different conversations.",
                param=EXTRA_CONVERSATION,
                reason="two conversations",
            )
        claim = replace(claim, family=claim.family or "openengine", conversation=own, placement=None)
    if parent:
        if claim.parent is not None and claim.parent != parent:
            raise EdgeError(Code.INVALID, "The metadata name different parents.", reason="different parents")
        claim = replace(claim, parent=parent)
    return claim


_OTHER_USES = frozenset(
    {"authorization", "cookie", "proxy-authorization", "set-cookie", "www-authenticate", "x-api-key"}
    | {"connection", "content-encoding", "content-length", "content-type", "date", "host", "keep-alive", "retry-after"}
    | {"server", "te", "trailer", "transfer-encoding", "upgrade", "x-kinroute-receipt", "x-request-id"}
)
Values = Mapping[str, str]


def fold(raw: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Names in lower case with dashes, values trimmed, blank ones absent, internal ones dropped in every spelling.

    `raw`: as bytes that were read as Latin-1. Of a name with different values the first two are kept, a line each: many
    headers may be repeated, and whoever reads an id or a key refuses two.
    """
    folded: dict[str, str] = {}
    for name, value in raw:
        key = fold_name(name)
        trimmed = _as_utf8(value.strip(" \t"))
        if not key or not trimmed or is_internal(key):
            continue
        before = folded.setdefault(key, trimmed)
        if trimmed != before and _AGAIN not in before:
            folded[key] = before + _AGAIN + trimmed
    return folded


def fold_name(name: str) -> str:
    return name.lower().replace("_", "-")


def is_internal(name: str) -> bool:
    """Whether a folded name is for our own parts to say, and nobody else's."""
    return _INTERNAL.match(name) is not None


def may_carry_ids(name: str) -> bool:
    """Whether a folded name can be configured: none of a credential, of HTTP or gRPC itself, or that is dropped."""
    return not (name in _OTHER_USES or is_internal(name) or name.startswith("grpc-") or name.endswith("-bin"))


def _as_utf8(value: str) -> str:
    """The same bytes as UTF-8 if they are that, so that an id is one id in a header and in a body."""
    if value.isascii():
        return value
    try:
        return value.encode("latin-1").decode()
    except UnicodeError:
        return value


class HeaderFamilies:
    """Reads a claim out of folded headers (`fold`) and a body's own fields."""

    def __init__(self, names: HeaderNames | None = None) -> None:
        self.names = names or HeaderNames()

    def read(self, headers: Values, *, body_conversation: str | None = None, cache_key: str | None = None) -> Claim:
        """Raises EdgeError: an id that is too long, has control characters, or contradicts another."""
        token = _value(headers, self.names.lineage, MAX_TOKEN_BYTES)
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
                break
        else:
            claim = self._others(headers, body_conversation, cache_key)
        # A token proves a parent and names nobody: an agent's own headers, or a body, still say who this is.
        return claim if token is None else replace(claim, token=token)

    def _ours(self, headers: Values) -> Claim | None:
        names = self.names
        if not (names.conversation in headers or names.parent in headers or names.final in headers):
            return None
        return Claim(
            family="kinroute",
            conversation=_value(headers, names.conversation),
            parent=_value(headers, names.parent),
            final=_flag(headers, names.final),
            explicit=True,
        )

    def _dynamo(self, headers: Values) -> Claim | None:
        names = self.names
        if not (names.dynamo_session in headers or names.dynamo_parent in headers):
            return None
        return Claim(
            "dynamo",
            _value(headers, names.dynamo_session),
            _value(headers, names.dynamo_parent),
            final=_flag(headers, names.dynamo_final),
        )

    def _claude_code(self, headers: Values) -> Claim | None:
        """Children share their root's session id, so an agent's conversation is session and agent together."""
        names = self.names
        session = _value(headers, names.claude_code_session)
        if session is None:
            return None
        agent, parent = _value(headers, names.claude_code_agent), _value(headers, names.claude_code_parent_agent)
        if agent is None:
            return Claim("claude-code", session, root=session)
        return Claim(
            "claude-code",
            conversation=_agent_id(session, agent),
            parent=session if parent is None else _agent_id(session, parent),
            root=session,
        )

    def _codex(self, headers: Values) -> Claim | None:
        names = self.names
        own = _value(headers, names.codex_thread) or _value(headers, names.codex_session)
        parent, kind = _value(headers, names.codex_parent), _value(headers, names.codex_kind)
        if own is None and parent is None:
            return None
        if kind in CODEX_SIDE_TASKS:
            return Claim("codex", own, side=True, placement=parent)
        return Claim("codex", own, parent)

    def _opencode(self, headers: Values) -> Claim | None:
        names = self.names
        parent = _value(headers, names.opencode_parent)
        if parent is None and names.opencode_session not in headers and names.opencode_affinity not in headers:
            return None
        own = _agreeing(headers, (names.opencode_session, names.opencode_id, names.opencode_affinity))
        return Claim("opencode", own, parent)

    def _others(self, headers: Values, body_conversation: str | None, cache_key: str | None) -> Claim:
        own = _body_id("conversation_params.conversation_id", body_conversation)
        if own is None:
            own = _agreeing(headers, self.names.others)
        parent = _value(headers, self.names.others_parent)
        near = _body_id("prompt_cache_key", cache_key)
        family = "other" if own is not None or parent is not None else ""
        # Beside its own id, the key would part it from its children: they know it by that id alone.
        return Claim(family, own, parent, placement=near if own is None else None)


def _agent_id(session: str, agent: str) -> str:
    """Joined by what neither can hold, so that no session id passes for a session and an agent."""
    return f"{session}\0{agent}"


def _body_id(name: str, value: str | None) -> str | None:
    trimmed = "" if value is None else value.strip(" \t")
    if trimmed:
        _require_id(name, trimmed, MAX_ID_BYTES)
    return trimmed or None


def _value(headers: Values, name: str, max_bytes: int = MAX_ID_BYTES) -> str | None:
    value = headers.get(name)
    if value is not None:
        if _AGAIN in value:
            raise EdgeError(
                Code.INVALID, f"{name} is given twice with different values.", param=name, reason="two values"
            )
        _require_id(name, value, max_bytes)
    return value


def _agreeing(headers: Values, names: Sequence[str]) -> str | None:
    """The value that all of `names` that are present have. Raises EdgeError where they differ."""
    found = {name: value for name in names if (value := _value(headers, name)) is not None}
    if len(set(found.values())) > 1:
        raise EdgeError(
            Code.INVALID,
            f"{' and '.join(found)} name different conversations.",
            param=next(iter(found)),
            reason="two conversations",
        )
    return next(iter(found.values()), None)


def _flag(headers: Values, name: str) -> bool:
    value = headers.get(name, "false").lower()
    if value not in ("true", "false"):
        raise EdgeError(Code.INVALID, f"{name} must be true or false.", param=name, reason="not a flag")
    return value == "true"


def _require_id(name: str, value: str, max_bytes: int) -> None:
    if len(value.encode(errors="surrogatepass")) > max_bytes:
        raise EdgeError(Code.INVALID, f"{name} is longer than {max_bytes} bytes.", param=name, reason="too long")
    if _CONTROL.search(value):
        raise EdgeError(Code.INVALID, f"{name} has control characters.", param=name, reason="control characters")
