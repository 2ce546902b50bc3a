from __future__ import annotations

from tests.worker.core.engines import make_engine


def test_a_batch_lays_its_sequences_one_after_the_other_each_with_its_row_of_pages() -> None:
    engine = make_engine(max_num_tokens=5)
    engine.submit(1, [1, 2, 3], max_tokens=3)
    engine.step()
    engine.submit(2, [4, 5, 6, 7, 8])

    engine.step()

    batch = engine.work.batch
    assert batch is not None
    assert batch.token_ids.tolist() == [9, 4, 5, 6, 7]
    assert batch.positions.tolist() == [3, 0, 1, 2, 3]
    assert batch.query_starts.tolist() == [0, 1, 5]
    assert batch.context_lens.tolist() == [4, 4]
    assert batch.page_table.tolist() == [[0, 1], [2, 3]]
    assert batch.slots.tolist() == [3, 4, 5, 6, 7]
    assert (batch.sample_rows.tolist(), batch.sample_requests) == ([0], (1,))


def test_a_row_shorter_than_the_widest_ends_in_empty_places() -> None:
    engine = make_engine()
    engine.submit(1, [1])
    engine.submit(2, [2, 3, 4, 5, 6])

    engine.step()

    batch = engine.work.batch
    assert batch is not None
    assert batch.page_table.tolist() == [[0, -1, -1], [1, 2, 3]]
    assert [column.dtype.name for column in (batch.token_ids, batch.positions, batch.page_table)] == ["int32"] * 3
    assert [column.dtype.name for column in (batch.query_starts, batch.sample_rows)] == ["int32"] * 2
    assert batch.slots.dtype.name == "int64"


def test_a_step_without_chunks_has_no_batch() -> None:
    engine = make_engine()
    engine.submit(1, [1])
    engine.step()

    engine.step()

    assert engine.work.batch is None
