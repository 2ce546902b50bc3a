"""The host's pages have the size of the device's, so that one is copied to the other as bytes."""

from __future__ import annotations

import torch

from worker.memory.device import DevicePool
from worker.memory.host import HostPool
from worker.memory.layout import KvLayout

CPU = torch.device("cpu")
LAYOUT = KvLayout(
    num_layers=2, num_kv_heads=3, head_dim=8, tokens_per_block=2, dtype="bfloat16", head_start=1, head_stop=3
)


def test_a_page_of_the_host_has_as_many_bytes_as_one_of_the_device() -> None:
    host, device = HostPool(LAYOUT, 5, CPU), DevicePool(LAYOUT, 1, CPU)

    assert host.tensor.shape == (5, LAYOUT.page_bytes)
    assert host.tensor.nbytes == 5 * device.nbytes
    assert host.tensor.dtype is torch.uint8
    assert host.tensor.is_contiguous()
    assert not host.tensor.is_pinned(), "only a GPU needs pinned memory"
