from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.memory.transfer.samples import NUM_PAGES, empty_pool, filled_pool, layouts
from worker.memory.layout import KvLayout
from worker.memory.transfer import pages as host
from worker.memory.transfer.pages import HostPages, PageBytes, rows_in, rows_of
from worker.memory.transfer.staged_pages import StagedPages
from worker.memory.transfer.stretches import Pages, stretches

(LAYOUT,) = layouts(3, 1)


@st.composite
def page_ids(draw: st.DrawFn) -> Pages:
    """Distinct pages, with neighbours among them."""
    order = draw(st.permutations(range(NUM_PAGES // 3)))
    ids = [3 * at + offset for at in order for offset in range(3)]
    return np.array(ids[: draw(st.integers(1, len(ids)))], np.int32)


@given(st.integers(1, 5), page_ids(), page_ids())
def test_stretches_are_all_indices_in_order_and_consecutive_in_every_column(
    max_pages: int, left: Pages, right: Pages
) -> None:
    size = min(len(left), len(right))
    columns = (left[:size], right[:size])

    found = list(stretches(max_pages, *columns))

    assert [at for start, stop in found for at in range(start, stop)] == list(range(size))
    for start, stop in found:
        assert stop - start <= max_pages
        for column in columns:
            assert np.array_equal(column[start:stop], np.arange(column[start], column[start] + stop - start))
    for (start, stop), (_, next_stop) in itertools.pairwise(found):
        joined = all(column[stop] == column[stop - 1] + 1 for column in columns)
        assert not joined or stop - start == max_pages or next_stop - start > max_pages


@pytest.mark.parametrize("kind", ["host", "staged"])
@settings(max_examples=30, deadline=None)
@given(ids=page_ids(), heads=st.sampled_from([(0, 3), (0, 2), (1, 3), (1, 2)]))
def test_pages_that_are_read_and_written_elsewhere_are_the_same(kind: str, ids: Pages, heads: tuple[int, int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "STAGED_BYTES", 3 * LAYOUT.page_bytes)
        patch.setattr(host, "DIRECT_BYTES", 3 * LAYOUT.page_bytes)
        source, target = filled_pool(LAYOUT), empty_pool(LAYOUT)
        reader: PageBytes
        writer: PageBytes
        if kind == "host":
            reader, writer = HostPages(rows_of(source.tensor)), HostPages(rows_of(target.tensor))
        else:
            reader = StagedPages(source.tensor, 3 * LAYOUT.page_bytes)
            writer = StagedPages(target.tensor, 3 * LAYOUT.page_bytes)

        sent = b"".join(bytes(piece) for pieces in reader.read(ids, heads) for piece in pieces)
        at = 0
        for pieces in writer.write(ids.copy(), heads):
            for piece in pieces:
                piece[:] = sent[at : at + len(piece)]
                at += len(piece)

        index = torch.from_numpy(ids.astype(np.int64))
        wanted = source.tensor.view(torch.int16)[index][:, :, :, heads[0] : heads[1]]
        assert at == len(sent) == wanted.numel() * 2
        assert sent == wanted.contiguous().numpy().tobytes()
        expected = torch.zeros_like(target.tensor.view(torch.int16))
        expected[index, :, :, heads[0] : heads[1]] = wanted
        assert torch.equal(target.tensor.view(torch.int16), expected)


@pytest.mark.parametrize("kind", ["host", "staged"])
def test_a_piece_that_was_not_filled_is_not_written(kind: str) -> None:
    target = empty_pool(LAYOUT)
    writer: PageBytes = (
        HostPages(rows_of(target.tensor)) if kind == "host" else StagedPages(target.tensor, LAYOUT.page_bytes)
    )

    for pieces in writer.write(np.array([1, 2], np.int32), (0, 2)):
        pieces[0][:] = b"x" * len(pieces[0])
        break

    assert not target.tensor.view(torch.int16).any()


@settings(max_examples=30, deadline=None)
@given(
    ids=page_ids(),
    targets=page_ids(),
    held=st.sampled_from([(0, 3), (0, 2), (1, 3)]),
    own=st.sampled_from([(0, 3), (0, 2), (1, 3)]),
)
def test_pages_are_copied_out_of_another_pool_head_by_head(
    ids: Pages, targets: Pages, held: tuple[int, int], own: tuple[int, int]
) -> None:
    size = min(len(ids), len(targets))
    ids, targets = ids[:size], targets[:size]
    theirs, ours = of_heads(held), of_heads(own)
    source, target = filled_pool(theirs), empty_pool(ours)
    start, stop = max(held[0], own[0]), min(held[1], own[1])
    memory = source.tensor.view(torch.uint8).numpy().reshape(-1)

    copied = sum(
        HostPages(rows_of(target.tensor)).copy_from(
            rows_in(memory, theirs),
            ids,
            (start - held[0], stop - held[0]),
            targets,
            (start - own[0], stop - own[0]),
        )
    )

    wanted = source.tensor.view(torch.int16)[torch.from_numpy(ids.astype(np.int64))]
    wanted = wanted[:, :, :, start - held[0] : stop - held[0]]
    expected = torch.zeros_like(target.tensor.view(torch.int16))
    expected[torch.from_numpy(targets.astype(np.int64)), :, :, start - own[0] : stop - own[0]] = wanted
    assert copied == wanted.numel() * 2
    assert torch.equal(target.tensor.view(torch.int16), expected)


def of_heads(heads: tuple[int, int]) -> KvLayout:
    return dataclasses.replace(LAYOUT, head_start=heads[0], head_stop=heads[1])
