"""What an artifact is held against: the PyTorch module in fp32 holding the artifact's own, rounded weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch
from torch import nn

from kogc.frontend.model_input import ModelInput
from kogc.frontend.trace import step_tokens
from kogc.ir.graph import Graph
from kogc.ir.passes.views import source_key
from kogc.ir.types import NUMPY_DTYPES
from kogc.ir.weights import WeightSource

_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def matrix_keys(graph: Graph) -> set[str]:
    """Keys of the weights an artifact stores in its dtype: matrices and the embedding tables of tokens. All others it keeps in fp32."""
    rounded = set()
    for node in graph:
        if node.op == "linear" or (node.op == "embed" and graph[node.inputs[0]].op == "token"):
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


def rounded_on(device: str, weights: WeightSource, keys: set[str], dtype: str) -> Callable[[str], torch.Tensor]:
    """``rounded`` for a reference on a GPU: the same values, rounded and widened there, where it takes no time."""

    def get(key: str) -> torch.Tensor:
        value = _to_torch(weights.get(key)).to(device)
        if value.dtype == torch.float64:
            raise ValueError(f"{key} is fp64: rounding it through fp32 would round it twice")
        return (value.to(_HALVES.get(dtype, torch.float32)) if key in keys else value).float()

    return get


def _to_torch(value: np.ndarray) -> torch.Tensor:
    """An array as a tensor; bf16 is none of NumPy's own types."""
    value = np.require(value, requirements=("C", "W"))
    half = value.dtype == NUMPY_DTYPES["bf16"]
    return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16) if half else torch.from_numpy(value)


def fp32_module(model: ModelInput, get: Callable[[str], np.ndarray | torch.Tensor], device: str = "cpu") -> nn.Module:
    """The model's module on ``device`` with ``get(name)`` for every parameter and empty caches, all floats at least fp32.

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
                    made[id(tensor)] = _filled(tensor, names, get, device)
                slots[slot] = made[id(tensor)]
    return module


def _without_values(module: nn.Module) -> dict[int, torch.Tensor]:
    """A ``deepcopy`` memo that puts meta tensors in the place of parameters: their values are about to be replaced."""
    return {id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False) for p in module.parameters()}


def _filled(tensor: torch.Tensor, names: dict[int, str], get: Callable[[str], np.ndarray | torch.Tensor], device: str) -> torch.Tensor:
    # What is fp64 stays so: a module written in fp64 may make fp64 values of its own, which fp32 would not go with.
    narrow = tensor.is_floating_point() and tensor.dtype != torch.float64
    wide = torch.float32 if narrow else tensor.dtype
    if isinstance(tensor, nn.Parameter):
        found = get(names[id(tensor)])
        values = found if isinstance(found, torch.Tensor) else _to_torch(found)
        return nn.Parameter(values.reshape(tensor.shape).to(device, wide), requires_grad=False)
    if tensor.is_meta:
        return torch.zeros(tensor.shape, dtype=wide, device=device)
    return tensor.detach().to(device, wide)


def module_logits(module: nn.Module, ids: Sequence[int], first: int = 0) -> np.ndarray:
    """Teacher-forced logits of ``module``, fp32 [T, vocab], fed from position ``first`` on, as many tokens at once as a trace takes:
    then it needs no other shapes than those it was made for.

    Its caches must hold what lies before. The last step is filled up with its last token at that token's own position, which writes the same values again.
    """
    logits, step, device = [], step_tokens(module), next(chain(module.parameters(), module.buffers())).device
    with torch.inference_mode():
        for start in range(0, len(ids), step):
            part = list(ids[start : start + step])
            position = torch.arange(first + start, first + start + step, device=device).clamp(max=first + len(ids) - 1)
            token = torch.tensor(part + part[-1:] * (step - len(part)), device=device)
            logits.append(module(token, position)[: len(part)].float().cpu().numpy())
    return np.concatenate(logits)
