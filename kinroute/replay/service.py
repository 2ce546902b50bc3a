"""What steps cost: the service times of the closed loop."""

from __future__ import annotations

from dataclasses import dataclass

from worker.core.step_load import StepLoad


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step: `step_s`; `prefill_token_s` for each token that it prefills, and `prefill_context_s` for each
    token of context that this one looks at; `decode_token_s` and `decode_context_s` for those that it decodes.

    The limits are a worker's defaults. The seconds are assumptions, for a dense model of 8 billion weights (32 layers,
    32 heads and 8 KV heads of 128, 2 bytes a number) on eight GPUs of 989 Tflop/s and 3.35 TB/s each (the data sheet of
    an H100 SXM) that reach half of either: each step reads all weights in 1.2 ms, prefill takes 2 flops a weight and
    524,288 flops a pair of tokens, decode reads 131,072 bytes of each token of context. That a step takes 2.8 ms more
    for its launches and exchanges, and a decoded token 0.1 ms, are guesses.
    """

    step_s: float = 0.004
    prefill_token_s: float = 4.0e-6
    prefill_context_s: float = 1.3e-10
    decode_token_s: float = 1e-4
    decode_context_s: float = 9.8e-9
    max_num_tokens: int = 2048
    max_batch_size: int = 64

    def seconds(self, load: StepLoad) -> float:
        """Of a step that does this."""
        return (
            self.step_s
            + load.prefill_tokens * self.prefill_token_s
            + load.prefill_context * self.prefill_context_s
            + load.decode_tokens * self.decode_token_s
            + load.decode_context * self.decode_context_s
        )
