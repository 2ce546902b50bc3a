"""Runs one rank's model over a batch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.core.types import Batch
from worker.memory.device import DevicePool
from worker.model.attention import step_attention
from worker.model.communicator import Communicator
from worker.model.loader import LoadedModel


class ModelRunner:
    """Use from one thread. Every rank enters `run` with the same batch; `pool` must outlive the runs."""

    def __init__(self, model: LoadedModel, communicator: Communicator, pool: DevicePool) -> None:
        self._model = model
        self._communicator = communicator
        self._pool = pool
        self._device = pool.tensor.device

    @torch.inference_mode()
    def run(self, batch: Batch) -> Tensor | None:
        """Float32 logits [R, V] on rank 0; None on the others, and where no row is to be sampled.

        Raises CommunicatorTimeout when another rank does not come.
        """
        self._pool.copy_pages(batch.page_copies)
        logits = self._model.module(
            input_ids=self._to_device(batch.token_ids)[None],
            position_ids=self._to_device(batch.positions)[None],
            use_cache=False,
            logits_to_keep=self._to_device(batch.sample_rows),
            step=step_attention(batch, self._pool.tensor),
        ).logits[0]
        if not len(batch.sample_rows):
            return None
        parts = self._communicator.gather(logits, self._model.vocabulary)
        if parts is None:
            return None
        return parts[0].float() if len(parts) == 1 else torch.cat(parts, -1).float()

    def _to_device(self, ids: npt.NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(ids).to(self._device, torch.long)
