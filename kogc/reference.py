"""What an artifact is held against: the PyTorch module in fp32 holding the artifact's own, rounded weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from kogc.frontend.model_input import ModelInput
from kogc.ir.graph import Graph
from kogc.ir.passes.views import source_key
from kogc.ir.types import NUMPY_DTYPES
from kogc.ir.weights import WeightSource

#: Tokens the module is given at once: as many as a trace takes, so that it needs no other shapes than those it was made for.
STEP = 4


def matrix_keys(graph: Graph) -> set[str]:
    """Keys of the weights an artifact stores in its dtype: matrices and embedding tables. All others it keeps in fp32."""
    rounded = set()
    for node in graph:
        if node.op in ("linear", "embed"):
            weight = graph[node.inputs[1]]
            if weight.op == "weight":
                rounded.add(source_key(weight))
    return rounded


def rounded(weights: WeightSource, keys: set[str], dtype: str) -> Callable[[str], np.ndarray]:
    """``key → fp32 values`` as the artifact holds them: those in ``keys`` rounded to ``dtype``."""

    def get(key: str) -> np.ndarray:
        value = weights.get(key)
        return (value.astype(NUMPY_DTYPES[dtype]) if key in keys else value).astype(np.float32)

    return get


def fp32_module(model: ModelInput, get: Callable[[str], np.ndarray]) -> nn.Module:
    """The model's module with ``get(name)`` for every parameter and empty caches, all floats at least fp32.

    Needs the memory of that module and of one tensor more. Tied parameters stay tied.
    """
    module = copy.deepcopy(model.module, _without_values(model.module)).eval()
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    made: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for slots in (part._parameters, part._buffers):
            for slot, tensor in slots.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = _filled(tensor, names, get)
                slots[slot] = made[id(tensor)]
    return module


def _without_values(module: nn.Module) -> dict[int, torch.Tensor]:
    """A ``deepcopy`` memo that puts meta tensors in the place of parameters: their values are about to be replaced."""
    return {id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False) for p in module.parameters()}


def _filled(tensor: torch.Tensor, names: dict[int, str], get: Callable[[str], np.ndarray]) -> torch.Tensor:
    # What is fp64 stays so: a module written in fp64 may make fp64 values of its own, which fp32 would not go with.
    narrow = tensor.is_floating_point() and tensor.dtype != torch.float64
    wide = torch.float32 if narrow else tensor.dtype
    if isinstance(tensor, nn.Parameter):
        values = torch.from_numpy(np.ascontiguousarray(get(names[id(tensor)])))
        return nn.Parameter(values.reshape(tensor.shape).to(wide), requires_grad=False)
    if tensor.is_meta:
        return torch.zeros(tensor.shape, dtype=wide)
    return tensor.detach().to(wide)


def module_logits(module: nn.Module, ids: Sequence[int]) -> np.ndarray:
    """Teacher-forced logits of ``module``, fp32 [T, vocab], fed from position 0 in steps of ``STEP`` tokens.

    The last step is filled up with its last token at that token's own position, which writes the same values again.
    """
    logits = []
    with torch.inference_mode():
        for start in range(0, len(ids), STEP):
            part = list(ids[start : start + STEP])
            position = torch.arange(start, start + STEP).clamp(max=len(ids) - 1)
            token = torch.tensor(part + part[-1:] * (STEP - len(part)))
            logits.append(module(token, position)[: len(part)].float().numpy())
    return np.concatenate(logits)
