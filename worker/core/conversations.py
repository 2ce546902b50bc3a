"""Which conversations this worker knows, whose children they are, and which of them are in flight.

Registered when a request is admitted, so alike on every rank. Bounded: when full, the tenant that holds most loses the
conversation that has been idle longest.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

DEFAULT_BOUND = 65_536


class News(enum.IntEnum):
    """What only the edge can know: a generation leg runs elsewhere; it ended; the conversation was closed; a turn of
    it was served by another worker."""

    GENERATING = 1
    ENDED = 2
    CLOSED = 3
    RETURNED = 4


class StopReason(enum.IntEnum):
    UNKNOWN = 0
    TOOL_CALL = 1
    END_OF_TURN = 2
    LENGTH = 3


@dataclass(slots=True, eq=False)
class Conversation:
    """`legs`: its requests that this worker has admitted and not ended, suspended ones included.

    `generating`: the edge said that a generation leg runs elsewhere. `last_context_step`: the plan in which its last
    prompt was done or given up, None before that. `final`: its last request was its last one. `last_turn`,
    `last_prompt`: of its last request, "" and b"" where they are not told. `demoted`: since its last request.
    """

    id: str
    tenant: bytes
    parent: str | None = None
    legs: int = 0
    generating: bool = False
    last_context_step: int | None = None
    stop_reason: StopReason = StopReason.UNKNOWN
    final: bool = False
    last_turn: str = ""
    last_prompt: bytes = b""
    demoted: bool = False

    @property
    def is_in_flight(self) -> bool:
        return self.legs > 0 or self.generating


@dataclass(slots=True)
class _Tenants:
    """Each tenant's conversations, the least recently active first, and which tenant has most."""

    by_tenant: dict[bytes, dict[str, Conversation]] = field(default_factory=dict)
    _of_size: dict[int, dict[bytes, None]] = field(default_factory=dict)

    def touch(self, conversation: Conversation) -> None:
        """Add it, or make it the most recently active."""
        mine = self.by_tenant.setdefault(conversation.tenant, {})
        if mine.pop(conversation.id, None) is None:
            self._resize(conversation.tenant, len(mine), len(mine) + 1)
        mine[conversation.id] = conversation

    def remove(self, conversation: Conversation) -> None:
        mine = self.by_tenant[conversation.tenant]
        del mine[conversation.id]
        self._resize(conversation.tenant, len(mine) + 1, len(mine))
        if not mine:
            del self.by_tenant[conversation.tenant]

    def oldest_idle(self) -> Conversation | None:
        """Of the tenant with the most conversations; of the next one if all of its are in flight."""
        for size in sorted(self._of_size, reverse=True):
            for tenant in self._of_size[size]:
                for conversation in self.by_tenant[tenant].values():
                    if not conversation.is_in_flight:
                        return conversation
        return None

    def _resize(self, tenant: bytes, before: int, after: int) -> None:
        if before:
            peers = self._of_size[before]
            del peers[tenant]
            if not peers:
                del self._of_size[before]
        if after:
            self._of_size.setdefault(after, {})[tenant] = None


class Conversations:
    """The registry. A conversation whose parent is unknown waits under that parent's id."""

    def __init__(self, bound: int = DEFAULT_BOUND) -> None:
        self._bound = bound
        self._known: dict[str, Conversation] = {}
        self._children: dict[str, dict[str, int]] = {}
        self._open: dict[str, dict[str, None]] = {}
        self._registered = 0
        self._tenants = _Tenants()
        self.last_child_step: int | None = None
        """When a conversation that has a parent ended a context the last time."""

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self._known.values())

    def __getitem__(self, conversation_id: str) -> Conversation:
        """One that is known."""
        return self._known[conversation_id]

    def find(self, conversation_id: str) -> Conversation | None:
        return self._known.get(conversation_id)

    def children(self, parent_id: str) -> list[Conversation]:
        """In the order in which they were registered under this parent."""
        return [self._known[child] for child in self._children.get(parent_id, ())]

    def open_children(self, parent_id: str) -> list[Conversation]:
        """As `children`, without those that are demoted and have none themselves; costs what it returns."""
        mine = self._open.get(parent_id)
        if mine is None:
            return []
        known, children = self._known, self._children
        for settled in [one for one in mine if known[one].demoted and one not in children]:
            del mine[settled]
        if not mine:
            del self._open[parent_id]
            return []
        return [known[one] for one in sorted(mine, key=children[parent_id].__getitem__)]

    def has_children(self, conversation_id: str) -> bool:
        return conversation_id in self._children

    def is_retry(self, conversation_id: str, turn: str, prompt: bytes) -> bool:
        """Whether a request with this turn and prompt hash repeats the conversation's last one."""
        known = self._known.get(conversation_id)
        if known is None:
            return False
        return bool(turn and turn == known.last_turn) or bool(prompt and prompt == known.last_prompt)

    def admitted(
        self, conversation_id: str, tenant: bytes, parent_id: str | None, turn: str = "", prompt: bytes = b""
    ) -> list[str]:
        """A request of it begins. Returns which conversations were forgotten for it.

        A proven parent replaces the one before; one that descends from this conversation is ignored.
        """
        conversation = self._known.get(conversation_id)
        forgotten: list[str] = []
        if conversation is None:
            forgotten = self._make_room()
            conversation = self._known[conversation_id] = Conversation(conversation_id, tenant)
        conversation.legs += 1
        conversation.final = False
        conversation.stop_reason = StopReason.UNKNOWN
        # A leg that says nothing of them does not make the next one new.
        conversation.last_turn = turn or conversation.last_turn
        conversation.last_prompt = prompt or conversation.last_prompt
        self._tenants.touch(conversation)
        if parent_id is not None and parent_id != conversation.parent and not self._descends(parent_id, conversation):
            self._leave_parent(conversation)
            conversation.parent = parent_id
            self._registered += 1
            self._children.setdefault(parent_id, {})[conversation_id] = self._registered
            self._reopen(self._known.get(parent_id))
        self._reopen(conversation)
        return forgotten

    def context_ended(self, conversation_id: str, step: int) -> None:
        """Its prompt is prefilled, or given up, in plan `step`."""
        conversation = self._known[conversation_id]
        conversation.last_context_step = step
        if conversation.parent is not None:
            self.last_child_step = step
        self._tenants.touch(conversation)

    def leg_ended(self, conversation_id: str) -> None:
        """A request of it is over on this worker."""
        conversation = self._known[conversation_id]
        assert conversation.legs > 0, f"conversation {conversation_id} ended more requests than it had"
        conversation.legs -= 1
        self._tenants.touch(conversation)

    def heard(self, conversation_id: str, news: News, reason: StopReason, *, final: bool) -> bool:
        """What the edge told. False: this worker does not know the conversation."""
        conversation = self._known.get(conversation_id)
        if conversation is None:
            return False
        match news:
            case News.GENERATING:
                conversation.generating = True
            case News.ENDED:
                conversation.generating = False
                conversation.stop_reason = reason
                conversation.final |= final
            case News.CLOSED:
                conversation.final = True
            case News.RETURNED:
                raise ValueError("a return is not news of one conversation alone: see Replica")
        self._tenants.touch(conversation)
        return True

    def returned(self, conversation_id: str, turn: str) -> bool:
        """Another worker served this turn of it. False: it is the last one that was heard of, again."""
        conversation = self._known.get(conversation_id)
        if conversation is None:
            return True
        if turn and turn == conversation.last_turn:
            return False
        conversation.last_turn, conversation.last_prompt = turn, b""
        return True

    def _descends(self, conversation_id: str, ancestor: Conversation) -> bool:
        """Whether following parents from `conversation_id` reaches `ancestor`."""
        at: str | None = conversation_id
        while at is not None and at != ancestor.id:
            known = self._known.get(at)
            at = known.parent if known is not None else None
        return at is not None

    def _make_room(self) -> list[str]:
        """Forget until one more may come. Those in flight are never forgotten: live requests bound them."""
        forgotten: list[str] = []
        while len(self._known) >= self._bound and (victim := self._tenants.oldest_idle()) is not None:
            self._tenants.remove(victim)
            self._leave_parent(victim)
            del self._known[victim.id]
            forgotten.append(victim.id)
        return forgotten

    def _reopen(self, conversation: Conversation | None) -> None:
        """It, or one of its children, may have something that can be demoted."""
        if conversation is not None and conversation.parent is not None:
            self._open.setdefault(conversation.parent, {})[conversation.id] = None

    def _leave_parent(self, conversation: Conversation) -> None:
        if conversation.parent is None:
            return
        opened = self._open.get(conversation.parent, {})
        if opened.pop(conversation.id, self) is None and not opened:
            del self._open[conversation.parent]
        siblings = self._children[conversation.parent]
        del siblings[conversation.id]
        if not siblings:
            del self._children[conversation.parent]

    def restore_children(self, children: Mapping[str, Sequence[str]]) -> None:
        """Begin with these, in their order."""
        for parent, mine in children.items():
            self._children[parent] = {child: self._registered + place for place, child in enumerate(mine, 1)}
            self._registered += len(mine)
            self._open[parent] = dict.fromkeys(mine)

    def check(self) -> None:
        """Children and parents name each other, and every tenant's list holds what it should."""
        for parent, children in self._children.items():
            assert children, "a parent without children"
            assert all(self._known[child].parent == parent for child in children), "a child of somebody else"
            asked = {one for one in children if not self._known[one].demoted or one in self._children}
            assert asked <= self._open.get(parent, {}).keys() <= children.keys(), "a child that no return would find"
        assert self._open.keys() <= self._children.keys(), "a parent of nobody"
        for conversation in self._known.values():
            assert conversation.parent is None or conversation.id in self._children[conversation.parent]
            assert not conversation.parent or not self._descends(conversation.parent, conversation), "a cycle"
        listed = [one for mine in self._tenants.by_tenant.values() for one in mine]
        assert sorted(listed) == sorted(self._known), "tenants list other conversations than there are"
