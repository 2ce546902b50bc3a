from __future__ import annotations

from pathlib import Path

from bench import long_prompt
from tests.edge.tokenizing.samples import sample, write_folder


def test_the_benchmark_of_long_prompts_measures_every_number_it_names(tmp_path: Path) -> None:
    results = long_prompt.run(write_folder(tmp_path, sample("byte_level_bpe")), prompt_chars=60_000)

    assert results["prompt_tokens"] > 10_000
    assert {"whole_cpu_ms", "next_turn_cpu_ms", "next_turn_to_whole"} <= results.keys()
    assert {"gap_ms_p99_alone", "gap_ms_p99_many_messages", "gap_ms_p99_one_message"} <= results.keys()
