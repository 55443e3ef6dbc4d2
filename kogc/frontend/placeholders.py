"""Tracing without weight memory and without a trace left behind in the user's module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def ready_to_trace(module: nn.Module) -> Iterator[torch.device]:
    """For the time of a ``with``: the module in evaluation mode, its meta tensors replaced by placeholders.

    A placeholder has the right shape and dtype and occupies one element (stride 0). Tied tensors stay tied. Yields the
    device the inputs belong on. Afterwards every submodule has its own mode, tensors and attributes back, also after an error:
    what it remembers of a traced call are no values.
    """
    device = _device(module)
    modes = [(part, part.training) for part in module.modules()]
    kept = [(part, dict(part.__dict__)) for part, _ in modes]
    swapped = _swap_meta_tensors(module, device)
    for part, _ in modes:
        part.training = False
    try:
        yield device
    finally:
        for part, training in modes:
            part.training = training
        for part, attributes in kept:
            part.__dict__.clear()
            part.__dict__.update(attributes)
        for slots, name, original in swapped:
            slots[name] = original


def _device(module: nn.Module) -> torch.device:
    tensors = [*module.parameters(), *module.buffers()]
    return next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))


def _swap_meta_tensors(module: nn.Module, device: torch.device) -> list[tuple[dict, str, torch.Tensor]]:
    """Put placeholders in; returns what to put back: (dict of the submodule, name, original tensor)."""
    made: dict[int, torch.Tensor] = {}
    swapped = []
    for part in module.modules():
        for slots in (part._parameters, part._buffers):
            for name, tensor in slots.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = _placeholder(tensor, device)
                swapped.append((slots, name, tensor))
                slots[name] = made[id(tensor)]
    return swapped


def _placeholder(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    value = torch.zeros(1, dtype=tensor.dtype, device=device).expand(tensor.shape)
    return nn.Parameter(value, requires_grad=False) if isinstance(tensor, nn.Parameter) else value
