"""The engine's outputs in the words of OpenEngine, which EngineLink shares."""

from __future__ import annotations

from collections.abc import Callable, Collection

from openengine.v1 import error_pb2, generation_pb2
from worker.core.outputs import Failed, Finished
from worker.core.types import FinishReason, Logprobs
from worker.requests import Active

REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: generation_pb2.FINISH_REASON_CANCELLED,
}

Spell = Callable[[int], str]
"""The text of one token on its own."""


def usage_of(active: Active) -> generation_pb2.Usage:
    return generation_pb2.Usage(
        prompt_tokens=active.prompt_tokens,
        completion_tokens=active.completion_tokens,
        total_tokens=active.prompt_tokens + active.completion_tokens,
        cached_prompt_tokens=min(active.cached_tokens, active.prompt_tokens),
    )


def token_info(token_id: int, logprobs: Logprobs | None, spell: Spell | None = None) -> generation_pb2.TokenInfo:
    """`spell` None leaves the text out: EngineLink's edges have the tokenizer."""
    info = generation_pb2.TokenInfo(token_id=token_id, token=spell(token_id) if spell else "")
    if logprobs is not None:
        info.logprob, info.rank = logprobs.logprob, logprobs.rank
        info.candidates.extend(
            generation_pb2.LogProb(token_id=other, logprob=logprob, token=spell(other) if spell else "", rank=position)
            for position, (other, logprob) in enumerate(logprobs.top, start=1)
        )
    return info


def stop_match_of(finished: Finished, eos_token_ids: Collection[int]) -> generation_pb2.StopMatch | None:
    if finished.stop_token_id is None:
        return None
    if finished.stop_token_id in eos_token_ids:
        return generation_pb2.StopMatch(eos_token_id=finished.stop_token_id)
    return generation_pb2.StopMatch(stop_token_id=finished.stop_token_id)


def error_of(failed: Failed) -> error_pb2.EngineError:
    return error_pb2.EngineError(code=f"ERROR_CODE_{failed.code}", message=failed.message, retryable=failed.retryable)
