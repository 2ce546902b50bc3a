"""The linear layers that take the place of transformers' own, once their weights are there."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from worker.model.communicator import Communicator


class PackedLinear(nn.Module):
    """A linear layer whose weight lies in oneDNN's own order, on a CPU: twice as fast for few rows, no slower for many.

    The order takes no more memory; `layer` is left without its weight.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight = layer.weight.detach()
        layer.weight = nn.Parameter(weight[:0], requires_grad=False)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._bias = None if layer.bias is None else layer.bias.detach()

    def forward(self, states: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(states, self._packed, self._bias, "none", [], "")
        return product


class RowParallel(nn.Module):
    """A linear layer of which every rank holds some inputs: outputs are summed, then the bias is added once."""

    def __init__(self, layer: nn.Linear, communicator: Communicator) -> None:
        super().__init__()
        self._bias = layer.bias
        layer.register_parameter("bias", None)
        self.inner: nn.Module = layer
        self._communicator = communicator

    def forward(self, states: Tensor) -> Tensor:
        total: Tensor = self.inner(states)
        self._communicator.all_reduce(total)
        return total if self._bias is None else total + self._bias


def pack(model: nn.Module) -> None:
    """Replace every linear layer of `model`, on a CPU, where this torch has oneDNN."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and layer.weight.dtype in (torch.float32, torch.bfloat16):
            replace(model, name, PackedLinear(layer))


def replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    owner, _, own = name.rpartition(".")
    setattr(model.get_submodule(owner), own, layer)
