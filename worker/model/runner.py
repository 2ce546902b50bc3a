"""Runs one forward of a rank's model over a batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from worker.core.types import Batch
from worker.memory.device import DevicePool
from worker.model.attention import StepAttention
from worker.model.communicator import Communicator
from worker.model.loader import LoadedModel


class ModelRunner:
    """Use from one thread. `run` is entered by every rank with the same batch but for its own pages' contents."""

    def __init__(self, model: LoadedModel, communicator: Communicator, pool: DevicePool) -> None:
        self._model = model
        self._communicator = communicator
        self._pool = pool
        self._device = pool.tensor.device

    @torch.inference_mode()
    def run(self, batch: Batch) -> Tensor | None:
        """Returns float32 logits [R, V] on rank 0, None on the others; None too where no row is to be sampled."""
        self._pool.copy_pages(batch.page_copies)
        step = StepAttention(batch, self._pool.tensor)
        states = self._model.base(
            input_ids=torch.from_numpy(batch.token_ids)[None].long().to(self._device),
            position_ids=torch.from_numpy(batch.positions)[None].long().to(self._device),
            use_cache=False,
            step=step,
        ).last_hidden_state[0]
        if not len(batch.sample_rows):
            return None
        rows = states[torch.from_numpy(batch.sample_rows).long().to(self._device)]
        logits = linear(rows, self._model.head)
        parts = self._communicator.gather(logits)
        return None if parts is None else torch.cat(parts, -1).float()
