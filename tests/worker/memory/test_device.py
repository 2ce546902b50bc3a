from __future__ import annotations

import mmap
import os

import pytest
import torch

from worker.core.types import PageId
from worker.memory.device import DevicePool
from worker.memory.layout import KvLayout

CPU = torch.device("cpu")


def make_pool(num_pages: int = 4, dtype: str = "float32") -> DevicePool:
    layout = KvLayout(
        num_layers=2, num_kv_heads=3, head_dim=8, tokens_per_block=2, dtype=dtype, head_start=1, head_stop=3
    )
    return DevicePool(layout, num_pages, CPU)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_pool_is_empty_at_first_and_as_large_as_its_pages(dtype: str) -> None:
    pool = make_pool(dtype=dtype)

    assert pool.tensor.shape == (4, 2, 2, 2, 2, 8)
    assert str(pool.tensor.dtype) == f"torch.{dtype}"
    assert pool.nbytes == pool.tensor.nbytes == 4 * pool.layout.page_bytes
    assert not pool.tensor.any()


def test_who_maps_the_descriptor_sees_the_pages() -> None:
    pool = make_pool()
    assert pool.fd is not None
    pool.tensor[3].fill_(1.5)

    with mmap.mmap(pool.fd, pool.nbytes, access=mmap.ACCESS_READ) as mapping:
        page = torch.frombuffer(bytearray(mapping[3 * pool.layout.page_bytes :]), dtype=torch.float32)

    assert page.numel() == 2 * 2 * 2 * 2 * 8
    assert torch.all(page == 1.5)


def test_who_has_the_descriptor_can_neither_write_the_pages_nor_cut_them_off() -> None:
    pool = make_pool()
    assert pool.fd is not None

    with pytest.raises(PermissionError):
        mmap.mmap(pool.fd, pool.nbytes)
    with pytest.raises(PermissionError):
        os.ftruncate(pool.fd, 0)

    pool.tensor.fill_(2.0)
    assert torch.all(pool.tensor == 2.0), "its own process writes as before"


def test_pages_are_copied_whole() -> None:
    pool = make_pool()
    for page in range(4):
        pool.tensor[page].fill_(float(page))

    pool.copy_pages([(PageId(1), PageId(3)), (PageId(0), PageId(2))])
    pool.copy_pages([])

    assert [float(page.mean()) for page in pool.tensor] == [0.0, 1.0, 0.0, 1.0]
    assert all(bool((page == page.flatten()[0]).all()) for page in pool.tensor)


def test_a_closed_pool_holds_no_descriptor() -> None:
    pool = make_pool()
    descriptor = pool.fd
    assert descriptor is not None

    pool.close()
    pool.close()

    assert pool.fd is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
