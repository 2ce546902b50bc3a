"""`transformers` itself, as the worker's benchmark holds it against: `python -m bench.transformers_reference FOLDER`.

Reads lines of JSON on stdin ({"what": "decode" | "prefill", "prompt": [ids], "tokens": n}); answers each with seconds.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    folder, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    sys.stdout.write(json.dumps({"event": "listening"}) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        asked = json.loads(line)
        prompt = torch.tensor([asked["prompt"]])
        took_s = _decode(model, prompt, asked["tokens"]) if asked["what"] == "decode" else _prefill(model, prompt)
        sys.stdout.write(json.dumps({"event": "took", "s": took_s}) + "\n")
        sys.stdout.flush()


@torch.inference_mode()
def _decode(model: torch.nn.Module, prompt: torch.Tensor, tokens: int) -> float:
    """Seconds for `tokens` greedy tokens behind the first."""

    def generate(count: int) -> float:
        began_s = time.perf_counter()
        model.generate(  # type: ignore[operator]
            prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return time.perf_counter() - began_s

    first_s = generate(1)
    return generate(tokens + 1) - first_s


@torch.inference_mode()
def _prefill(model: torch.nn.Module, prompt: torch.Tensor) -> float:
    began_s = time.perf_counter()
    model(prompt, logits_to_keep=1)
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main()
