"""Why a conversation's blocks are worth what they are, as an operator asks: plain values, ready for JSON."""

from __future__ import annotations

from typing import Any

from worker.core.returns.ages import EDGES_MS, NUM_BUCKETS
from worker.core.returns.classes import described
from worker.core.returns.index import ReturnIndex
from worker.core.returns.learner import SMALLEST_INDEX

PER_FACTOR_OF_TEN = 1000


def explained(index: ReturnIndex, conversation: str) -> dict[str, Any] | None:
    """`class`: what counts of it; `age_ms`: [from, to), to None for the oldest; `index_per_s`: the best chance of a
    return per second held; None where it is in flight, nothing is known of the class yet, or the guard fell back.
    None: it has had no request here."""
    claim = index.find(conversation)
    if claim is None:
        return None
    runs = len(claim.runs)
    if claim.in_flight:
        return {"class": None, "age_ms": None, "index_per_s": None, "runs": runs, "why": "a request of it is in flight"}
    last = claim.bucket + 1 == NUM_BUCKETS
    age_ms = [EDGES_MS[claim.bucket], None if last else EDGES_MS[claim.bucket + 1]]
    told: dict[str, Any] = {"class": described(claim.group), "age_ms": age_ms, "index_per_s": None, "runs": runs}
    if not index.is_active:
        return {**told, "why": "the guard has fallen back to lru"}
    if not index.tables.is_learned:
        return {**told, "why": "nothing is learned yet: the younger the longer"}
    value = index.tables.value(claim.group, claim.bucket)
    whose = "its class" if claim.group in index.tables.rows else "all classes together, as its own is new"
    per_s = float(f"{SMALLEST_INDEX * 10 ** (value / PER_FACTOR_OF_TEN):.3g}")
    return {**told, "index_per_s": per_s, "why": f"learned of {whose}, at this age"}
