"""Turns a GGUF file into a Hugging Face folder: `python -m kinroute.convert GGUF FOLDER`.

A process of its own, so that the command that waits for it needs no torch. Prints one JSON line per stage on stdout.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

STAGES = ("tokenizer", "weights", "saving", "done")


def _stage(name: str) -> None:
    sys.stdout.write(json.dumps({"stage": name}) + "\n")
    sys.stdout.flush()


def convert(gguf: Path, folder: Path) -> None:
    """Write config, tokenizer and bfloat16 safetensors of `gguf` into the existing empty `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    _stage("tokenizer")
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    _stage("weights")
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    _stage("saving")
    model.save_pretrained(folder)
    _stage("done")


if __name__ == "__main__":
    # What this process makes stays until its end: to search it for garbage would take half as long again.
    gc.disable()
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
