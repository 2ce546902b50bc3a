"""The cache as the contract states it: one node per block, dictionaries and full scans.

Slow and plain on purpose: what the run tree, its pools and its retention do cleverly is decided here again from
scratch, to be compared. The one thing taken over from the run tree is where its runs begin, because blocks of one run
leave a tier together, by the priority of the last of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field

from worker.core.config import CacheConfig
from worker.core.pools import AHEAD_SHARE, WRITES_AHEAD
from worker.core.stats import BELOW_THRESHOLD, CAPACITY, CLEARED, COPY_FAILED, NO_COLDER_TIER, TIER_OFF
from worker.core.tiers import COLD, Tier
from worker.core.types import DEFAULT_PRIORITY

Tokens = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Block:
    """`path`: scope and tokens up to its end. `filled_by`: the running copy that fills its page, 0: nobody, it can be
    read. `begins_run`: the block above it lies in another run. A root is a block without tokens and without a page.
    """

    parent: Block | None
    path: tuple[bytes, Tokens]
    owner: str = ""
    priority: int = DEFAULT_PRIORITY
    duration_ms: int = 0
    until_ms: int = 0
    demoted: bool = False
    tier: Tier = Tier.DEVICE
    stamp: tuple[int, int] = (0, 0)
    begins_run: bool = True
    filled_by: int = 0
    gone: bool = False
    children: dict[Tokens, Block] = field(default_factory=dict)

    def up(self) -> Iterator[Block]:
        """It and what lies above it, without the root."""
        block = self
        while block.parent is not None:
            yield block
            block = block.parent

    def down(self) -> Iterator[Block]:
        """It and all that hangs below it."""
        yield self
        for child in self.children.values():
            yield from child.down()

    @property
    def effective(self) -> int:
        """The highest priority of its own and of all that hangs below it."""
        return max(block.priority for block in self.down())

    @property
    def is_readable(self) -> bool:
        return self.tier is Tier.DEVICE and not self.filled_by


@dataclass(slots=True)
class Copy:
    source: Tier
    target: Tier
    blocks: list[Block]


class NaiveCache:
    """`ends`: the last block of each holder's path. `private`: device pages of holders that hold nothing committed."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.sizes = (config.num_pages, config.num_host_pages, config.num_disk_pages)
        self.roots: dict[bytes, Block] = {}
        self.ends: dict[Hashable, Block] = {}
        self.private: Counter[Hashable] = Counter()
        self.copies: dict[int, Copy] = {}
        self.off: set[Tier] = set()
        self.dropped: Counter[str] = Counter()
        self.num_copies = 0
        self.plan = 0
        self.now_ms = 0
        self.released = 0
        self.may_sink = [0, 0]
        self.may_load = 0

    def begin(self, plan: int, now_ms: int) -> None:
        """A plan begins: priorities lapse where nobody uses the block any more."""
        self.plan, self.now_ms, self.released = plan, now_ms, 0
        self.may_sink = [self.config.max_offload_pages_per_plan] * 2
        self.may_load = self.config.max_onboard_pages_per_plan
        held = self.held()
        for block in self.blocks():
            if 0 < block.until_ms <= now_ms and block not in held:
                block.priority, block.duration_ms, block.until_ms = DEFAULT_PRIORITY, 0, 0

    # What there is.

    def blocks(self) -> Iterator[Block]:
        for root in self.roots.values():
            for child in root.children.values():
                yield from child.down()

    def held(self) -> set[Block]:
        return {block for end in self.ends.values() for block in end.up()}

    def num_free(self, tier: Tier) -> int:
        used = sum(block.tier is tier for block in self.blocks()) + self.num_charged(tier)
        return self.sizes[tier] - used - (self.private.total() if tier is Tier.DEVICE else 0)

    def num_charged(self, tier: Tier) -> int:
        """Pages that running loads leave, or fill on the device for blocks that need them no more."""
        if tier is not Tier.DEVICE:
            return self.num_leaving(tier)
        loads = [(number, copy) for number, copy in self.copies.items() if copy.target is Tier.DEVICE]
        return sum(block.filled_by != number for number, copy in loads for block in copy.blocks)

    def num_leaving(self, tier: Tier) -> int:
        loads = [copy for copy in self.copies.values() if copy.target is Tier.DEVICE]
        return sum(len(copy.blocks) for copy in loads if copy.source is tier)

    def num_idle(self, tier: Tier) -> int:
        held = self.held()
        return sum(block.tier is tier and block not in held for block in self.blocks())

    def match(self, scope: bytes, blocks: Iterable[Tokens]) -> Block:
        """The last block of the longest committed prefix; the root where there is none."""
        at = self.roots.setdefault(scope, Block(None, (scope, ())))
        for tokens in blocks:
            if tokens not in at.children:
                break
            at = at.children[tokens]
        return at

    @staticmethod
    def match_within(at: Block, rest: Tokens) -> tuple[Block, int] | None:
        """The readable block behind `at` that shares most of its beginning with `rest`, and how much."""
        best: tuple[Block, int] | None = None
        for tokens, child in at.children.items():
            same = 0
            while same < min(len(tokens), len(rest)) and tokens[same] == rest[same]:
                same += 1
            if same > (best[1] if best is not None else 0) and child.is_readable:
                best = child, same
        return best

    # Who holds what.

    def hold(self, who: Hashable, end: Block) -> None:
        self.ends[who] = end

    def release(self, who: Hashable) -> None:
        """The path was used until now; what is behind it in its run was not."""
        end = self.ends.pop(who)
        self.private.pop(who, None)
        self.released += 1
        for block in end.up():
            block.stamp = (self.plan, self.released)
        if end.parent is not None:
            for child in end.children.values():
                child.begins_run = True

    def count_durations(self, end: Block) -> None:
        """A request let go of this path: durations count from now."""
        for block in end.up():
            if block.duration_ms:
                block.until_ms = self.now_ms + block.duration_ms

    # Committing.

    def commit(self, who: Hashable, blocks: Iterable[Tokens], owner: str, worth: Iterable[tuple[int, int]]) -> int:
        """Blocks that `who` computed in private pages, each with its (priority, duration), become visible behind its
        path; what is there already stays whose it was. Returns how many of its pages are needed no more."""
        unneeded = 0
        added = False
        for tokens, (priority, duration_ms) in zip(blocks, worth, strict=True):
            above = self.ends[who]
            child = above.children.get(tokens)
            self.private[who] -= 1
            if child is None:
                child = self._add(above, tokens)
                child.owner, child.priority, child.duration_ms = owner, priority, duration_ms
                added = True
            elif child.is_readable:
                unneeded += 1
            else:
                child.tier, child.filled_by = Tier.DEVICE, 0
            self.ends[who] = child
        if added:
            self.extended(self.ends[who], owner)
        return unneeded

    @staticmethod
    def _add(above: Block, tokens: Tokens) -> Block:
        """In the run of the block above where nothing else hangs there."""
        begins_run = above.parent is None or bool(above.children)
        for other in above.children.values():
            other.begins_run = True
        child = Block(above, (above.path[0], above.path[1] + tokens), begins_run=begins_run)
        above.children[tokens] = child
        return child

    # Leaving a tier.

    def colder(self, tier: Tier) -> Tier | None:
        return next((one for one in COLD if one > tier and self.sizes[one] and one not in self.off), None)

    def victim(self, tier: Tier) -> Block | None:
        """Of those that nobody holds and below which all is colder: lowest effective priority, then longest unused."""
        held = self.held()
        leaving = [
            block
            for block in self.blocks()
            if block.tier is tier and block not in held and all(one.tier > tier for one in block.children.values())
        ]
        return min(leaving, key=lambda block: (block.effective, block.stamp), default=None)

    def make_room(self, count: int) -> bool:
        """`count` pages of the device are free, or so many cannot be, and nothing changed."""
        if self.num_free(Tier.DEVICE) + self.num_idle(Tier.DEVICE) < count:
            return False
        while (missing := count - self.num_free(Tier.DEVICE)) > 0:
            assert self._leave(Tier.DEVICE, missing), "an idle block that cannot leave"
        return True

    def make_ahead(self) -> None:
        """Room on the device for the next plan, when more than half of it is missing."""
        ahead = min(self.config.max_offload_pages_per_plan, -(-self.sizes[Tier.DEVICE] // AHEAD_SHARE))
        if self.colder(Tier.DEVICE) is None or 2 * self.num_free(Tier.DEVICE) >= ahead:
            return
        while (missing := ahead - self.num_free(Tier.DEVICE)) > 0 and self._leave(Tier.DEVICE, missing, ahead=True):
            pass

    def _leave(self, tier: Tier, count: int, *, ahead: bool = False, limit: int | None = None) -> bool:
        """The next victim and those above it in its run that are worth no more, `count` at most, move down or go.

        `ahead`: only what is below the threshold may go. `limit`: nothing that is worth more may leave.
        """
        last = self.victim(tier)
        if last is None or (limit is not None and last.effective > limit):
            return False
        priority = last.effective
        leaving = [last]
        held = self.held()
        while len(leaving) < count and not leaving[-1].begins_run:
            above = leaving[-1].parent
            assert above is not None
            if above.tier is not tier or above in held or above.priority > priority:
                break
            leaving.append(above)
        colder = self.colder(tier)
        if colder is None:
            reason = NO_COLDER_TIER
        elif priority < self.config.cold_tier_offload_min_priority:
            reason = BELOW_THRESHOLD
        elif self._sink(leaving, colder, priority, count):
            return True
        else:
            reason = CAPACITY
        if ahead and reason is not BELOW_THRESHOLD:
            return False
        self.drop(leaving[-1], reason)
        return True

    def _sink(self, leaving: list[Block], target: Tier, priority: int, wanted: int) -> bool:
        """As many of `leaving`, from the leaf upward, as this plan may move and as there is or can be room for.

        Room is made for all that is `wanted` of their tier.
        """
        source = leaving[0].tier
        may_move = self.may_sink[source]
        if target is Tier.DISK:
            on_their_way = sum(len(copy.blocks) for copy in self.copies.values() if copy.target is Tier.DISK)
            may_move = min(may_move, WRITES_AHEAD * self.config.max_offload_pages_per_plan - on_their_way)
        wanted = min(wanted, may_move, self.num_idle(source))
        while (missing := wanted - self.num_free(target)) > 0 and self._leave(target, missing, limit=priority):
            pass
        count = min(len(leaving), may_move, self.num_free(target))
        if count <= 0:
            return False
        self.may_sink[source] -= count
        self._copy(leaving[:count][::-1], source, target)
        return True

    def _copy(self, blocks: list[Block], source: Tier, target: Tier) -> int:
        self.num_copies += 1
        self.copies[self.num_copies] = Copy(source, target, blocks)
        for block in blocks:
            block.tier, block.filled_by = target, self.num_copies
        return self.num_copies

    def drop(self, block: Block, reason: str) -> None:
        """With all that hangs below it."""
        assert block.parent is not None
        gone = list(block.down())
        assert not self.held() & set(gone), "somebody holds what is dropped"
        block.parent.children = {tokens: one for tokens, one in block.parent.children.items() if one is not block}
        self.dropped[reason] += len(gone)
        for one in gone:
            one.gone, one.filled_by = True, 0

    # Coming back, and what copies come to.

    def load(self, who: Hashable, count: int) -> bool:
        """The first `count` blocks of its path that are in colder tiers are on their way to the device."""
        if not self.make_room(count):
            return False
        cold = [block for block in [*self.ends[who].up()][::-1] if block.tier is not Tier.DEVICE][:count]
        self.may_load -= count
        for tier in COLD:
            part = [block for block in cold if block.tier is tier]
            if part:
                self.hold(f"copy {self._copy(part, tier, Tier.DEVICE)}", part[-1])
        return True

    def copied(self, number: int, good: int) -> None:
        """Blocks whose pages did not arrive are lost, unless they have others meanwhile."""
        copy = self.copies.pop(number)
        self.ends.pop(f"copy {number}", None)
        lost = [block for block in copy.blocks[good:] if block.filled_by == number]
        for block in copy.blocks:
            if block.filled_by == number:
                block.filled_by = 0
        for block in lost:
            self._lose(block, COPY_FAILED)

    def switch_off(self, tier: Tier) -> None:
        self.off.add(tier)
        for block in [block for block in self.blocks() if block.tier is tier]:
            self._lose(block, TIER_OFF)

    def _lose(self, block: Block, reason: str) -> None:
        """Whoever holds it holds what is above it."""
        if block.gone:
            return
        gone = set(block.down())
        assert block.parent is not None
        for who, end in list(self.ends.items()):
            if end in gone:
                self.ends[who] = block.parent
                if str(who).startswith("copy"):
                    del self.ends[who]
        self.drop(block, reason)

    # Whose blocks are worth what.

    def owned(self, owners: Iterable[str]) -> set[Block]:
        wanted = set(owners) - {""}
        return {block for block in self.blocks() if block.owner in wanted}

    def clear_of_others(self, covered: set[Block]) -> set[Block]:
        """Those of `covered` that nobody holds and below which nothing else hangs."""
        held = self.held()
        return {
            block
            for block in covered
            if not block.gone and all(one in covered and one not in held for one in block.down())
        }

    def demote(self, conversation: str, covered: set[Block], priority: int) -> None:
        for block in self.clear_of_others(covered):
            if block.owner == conversation:
                block.priority = min(block.priority, priority)
                block.duration_ms = block.until_ms = 0
                block.demoted = True

    def restore(self, conversation: str) -> None:
        for block in self.owned([conversation]):
            self._raise(block)

    def extended(self, end: Block, owner: str) -> None:
        """Somebody else's commit extends demoted blocks."""
        for block in end.up():
            if block.owner != owner or not owner:
                self._raise(block)

    @staticmethod
    def _raise(block: Block) -> None:
        if block.demoted:
            block.priority, block.demoted = DEFAULT_PRIORITY, False

    def clear(self, scope: bytes | None, owners: tuple[str, ...] | None) -> None:
        """Drop what nobody holds: all; what is in `scope`; what `owners` own and nobody else extends."""
        held = self.held()
        if owners is not None:
            going = self.clear_of_others(self.owned(owners))
        else:
            going = {one for one in self.blocks() if one not in held and scope in (None, one.path[0])}
        for block in going:
            if not block.gone:
                self.drop(block, CLEARED)
