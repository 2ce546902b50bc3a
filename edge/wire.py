"""A leg in OpenEngine's messages, which EngineLink shares, and what EngineLink adds."""

from __future__ import annotations

from edge.core.errors import Code, EdgeError
from edge.core.types import FinishReason, SamplingOptions, StopOptions, TokenLogprob
from enginelink.retention import Retention
from enginelink.v1 import link_pb2
from openengine.v1 import error_pb2, generation_pb2

CODES = {
    error_pb2.ERROR_CODE_INVALID_ARGUMENT: Code.INVALID,
    error_pb2.ERROR_CODE_UNSUPPORTED_FEATURE: Code.INVALID,
    error_pb2.ERROR_CODE_MODEL_NOT_FOUND: Code.MODEL_NOT_FOUND,
    error_pb2.ERROR_CODE_OVERLOADED: Code.OVERLOADED,
    error_pb2.ERROR_CODE_CANCELLED: Code.CANCELLED,
    error_pb2.ERROR_CODE_KV_SESSION_NOT_FOUND: Code.KV_SESSION_NOT_FOUND,
    error_pb2.ERROR_CODE_KV_TRANSFER_FAILED: Code.KV_TRANSFER_FAILED,
}

WORKERS_FAULT = {
    Code.WORKER_FAILED: "A worker failed.",
    Code.KV_SESSION_NOT_FOUND: "The pages of this prefill are gone.",
    Code.KV_TRANSFER_FAILED: "The pages of this prefill could not be fetched.",
}


def sampling_message(sampling: SamplingOptions) -> generation_pb2.SamplingParams:
    return generation_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
    )


def stopping_message(stops: StopOptions) -> generation_pb2.StoppingOptions:
    return generation_pb2.StoppingOptions(
        max_tokens=stops.max_tokens,
        min_tokens=stops.min_tokens,
        ignore_eos=stops.ignore_eos,
        conditions=[generation_pb2.StopCondition(stop_token_id=token) for token in stops.stop_token_ids],
    )


def response_message(sampling: SamplingOptions) -> generation_pb2.ResponseOptions | None:
    if sampling.logprobs is None:
        return None
    return generation_pb2.ResponseOptions(
        return_output_logprobs=True,
        output_candidates=generation_pb2.CandidateTokenSelection(top_n=sampling.logprobs),
    )


def retention_message(retention: Retention | None) -> link_pb2.Retention | None:
    if retention is None:
        return None
    return link_pb2.Retention(
        ranges=[
            link_pb2.Retention.TokenRange(
                start=one.start, stop=one.stop, priority=one.priority, duration_ms=one.duration_ms
            )
            for one in retention.ranges
        ],
        decode_priority=retention.decode_priority,
        decode_duration_ms=retention.decode_duration_ms,
    )


def logprob_from(info: generation_pb2.TokenInfo) -> TokenLogprob | None:
    if not info.HasField("logprob"):
        return None
    top = tuple((candidate.token_id, candidate.logprob) for candidate in info.candidates)
    return TokenLogprob(info.token_id, info.logprob, top)


def reason_from(reason: generation_pb2.FinishReason) -> FinishReason:
    match reason:
        case generation_pb2.FINISH_REASON_LENGTH:
            return FinishReason.LENGTH
        case generation_pb2.FINISH_REASON_CANCELLED:
            return FinishReason.CANCELLED
        case _:
            return FinishReason.STOP


def error_from(error: error_pb2.EngineError) -> EdgeError:
    """A worker's own words go out only where the caller can act on them."""
    code = CODES.get(error.code, Code.WORKER_FAILED)
    message = WORKERS_FAULT.get(code, error.message)
    retry_after_s = 1.0 if code is Code.OVERLOADED else None
    return EdgeError(code, message, retryable=error.retryable, retry_after_s=retry_after_s)
