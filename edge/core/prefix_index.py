"""What each worker was last sent of each conversation: where a prefix is probably cached."""

from __future__ import annotations

from collections import OrderedDict

from edge.core.fleet import Worker
from edge.core.types import ConversationKey, WorkerId

MAX_ENTRIES = 131_072


class PrefixIndex:
    """An estimate: a worker may have evicted it since, or the conversation may go on otherwise. Bounded: the entry that
    was noted longest ago is forgotten. A worker that started again has nothing."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._tokens: OrderedDict[tuple[ConversationKey, WorkerId, str], int] = OrderedDict()

    def note(self, conversation: ConversationKey, worker: Worker, tokens: int) -> None:
        """`worker` has the conversation's first `tokens` tokens now."""
        entry = (conversation, worker.worker_id, worker.instance_id)
        self._tokens[entry] = tokens
        self._tokens.move_to_end(entry)
        if len(self._tokens) > self._max_entries:
            self._tokens.popitem(last=False)

    def tokens(self, conversation: ConversationKey, worker: Worker) -> int:
        """How many tokens of the conversation `worker` was last sent; 0 where that is not known."""
        return self._tokens.get((conversation, worker.worker_id, worker.instance_id), 0)
