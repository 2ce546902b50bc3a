from dataclasses import dataclass
@dataclass(frozen=True, slots=True)
class Bound:
    prompt_blocks: int
    hit_blocks: int
