"""What one arm of a replay came to. Everything can be sent between processes and written as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Tail:
    """Uncached prompt tokens of one request, over some requests."""

    requests: int
    mean: float
    p50: int
    p99: int
    worst: int


@dataclass(frozen=True, slots=True)
class SessionTail:
    """Of one play of a session: uncached prompt tokens of all its requests, and of one. `share`: of all its prompt
    tokens."""

    play: int
    requests: int
    uncached_tokens: int
    p50: int
    p99: int
    worst: int
    share: float


@dataclass(frozen=True, slots=True)
class TierSample:
    """Pages of one tier at a moment, as `PageCounts` has them; `demoted`: idle blocks below the default priority."""

    total: int
    free: int
    held: int
    idle: int
    moving: int
    demoted: int


@dataclass(frozen=True, slots=True)
class Sample:
    """The cache at a moment. `tiers`: warm to cold, those that there are. Counts are since the sample before."""

    t_s: float
    tiers: dict[str, TierSample]
    demoted_blocks: int
    dropped_blocks: int


@dataclass(frozen=True, slots=True)
class Member:
    """A conversation of one family at a moment. Blocks are those that it was the first to compute, by where they are.

    `state`: "running", "idle", "demoted", "final", or "unknown" to the worker.
    """

    conversation: str
    parent: str | None
    kind: str
    state: str
    device: int
    host: int
    disk: int
    dropped: int


@dataclass(frozen=True, slots=True)
class Family:
    """One play of a session at a moment; `members` by arrival."""

    play: int
    t_s: float
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Service:
    """What the closed loop gave. Times to the first token are from arrival; `makespan_s`: from the first counted
    arrival to the last answer's end."""

    ttft_p50_s: float
    ttft_p99_s: float
    ttft_mean_s: float
    makespan_s: float
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    busy_share: float


@dataclass(frozen=True, slots=True)
class RunResult:
    """Counts are of the requests after the warm-up, and of what happened from the arrival of the first of them on.

    `hit_blocks`: prompt blocks that admitted requests found, in whatever tier. `regretted_blocks`: prompt blocks that a
    request found in no tier and that LRU, with one cache as large as all tiers, would still have had: what was given up
    for something else and asked for again after all. Of `lru` there are none; None in the closed loop, where arrivals
    would differ.
    `offloaded_blocks`, `onboarded_blocks`: by the tier that they went to, or came from. `refused`: requests with
    prompts larger than the device tier; all of their blocks count as missed. `digest`: of every decision, in hex.
    `tails`: by "all", "root", "sub", "side"; "session" is of the uncached tokens of whole sessions.
    `sessions`: those with most of them. `family`: one that was alive when four fifths of the requests had arrived.
    """

    policy: str
    role: str
    capacity_blocks: int
    host_blocks: int
    disk_blocks: int
    hints: str
    tp: int
    requests: int
    counted: int
    refused: int
    prompt_blocks: int
    hit_blocks: int
    block_hit_ratio: float
    prompt_tokens: int
    uncached_tokens: int
    demotions: int
    demoted_blocks: int
    restorations: int
    restored_blocks: int
    regretted_blocks: int | None
    dropped_blocks: int
    offloaded_blocks: dict[str, int]
    onboarded_blocks: dict[str, int]
    suspensions: int
    plans: int
    simulated_s: float
    digest: str
    tails: dict[str, Tail] = field(default_factory=dict)
    sessions: tuple[SessionTail, ...] = ()
    timeline: tuple[Sample, ...] = ()
    family: Family | None = None
    service: Service | None = None
