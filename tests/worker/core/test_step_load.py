from __future__ import annotations

from tests.worker.core.engines import make_engine
from worker.core.step_load import StepLoad, load_of


def test_a_step_is_what_it_prefills_and_decodes_and_how_much_each_token_looks_at() -> None:
    engine = make_engine()
    engine.submit(1, [1, 2, 3], max_tokens=5)
    engine.step()
    engine.submit(2, [5, 6, 7, 8], max_tokens=5)
    engine.step()
    batch = engine.work.batch
    assert batch is not None

    assert load_of(batch) == StepLoad(
        prefill_tokens=4, prefill_context=1 + 2 + 3 + 4, decode_tokens=1, decode_context=4
    )
