"""Decode steps as exporters write them: past keys and values in, present ones, longer by the new tokens, out."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from kogc.frontend.transformers_step import cache_shapes

PAST, TOKENS = 5, 3


class Decoder(nn.Module):
    """A Transformers model under the signature that Optimum exports; ``positions``: with ``position_ids`` among its inputs."""

    def __init__(self, model: nn.Module, positions: bool = True) -> None:
        super().__init__()
        self.model, self.positions = model, positions

    def forward(self, input_ids, attention_mask, *rest):
        positions, past = (rest[0], rest[1:]) if self.positions else (None, rest)
        cache = DynamicCache(list(zip(past[0::2], past[1::2], strict=True)))
        found = self.model(input_ids=input_ids, attention_mask=attention_mask, position_ids=positions, past_key_values=cache, use_cache=True)
        return (found.logits, *(one for layer in cache.layers for one in (layer.keys, layer.values)))


def _example(model: nn.Module, positions: bool) -> tuple[tuple[torch.Tensor, ...], list[str], list[str]]:
    """Inputs, and the names of inputs and outputs as Optimum gives them."""
    pairs = cache_shapes(model, PAST, "the model")
    ids = [torch.zeros(1, TOKENS, dtype=torch.int64), torch.ones(1, PAST + TOKENS, dtype=torch.int64), torch.arange(PAST, PAST + TOKENS)[None]]
    names = ["input_ids", "attention_mask", "position_ids"][: 2 + positions]
    parts = [f"{layer}.{kind}" for layer in range(len(pairs)) for kind in ("key", "value")]
    caches = [torch.zeros(shape, dtype=model.dtype) for pair in pairs for shape in pair]
    return (*ids[: 2 + positions], *caches), [*names, *(f"past_key_values.{part}" for part in parts)], ["logits", *(f"present.{part}" for part in parts)]


def by_dynamo(model: nn.Module, path: Path, positions: bool = True) -> Path:
    """``torch.onnx.export(dynamo=True)``, weights in a file of their own."""
    example, names, outputs = _example(model, positions)
    more, opened = torch.export.Dim.DYNAMIC, {1: torch.export.Dim.DYNAMIC}
    caches = tuple({2: more} for _ in outputs[1:])
    rest = ((opened, *caches),) if positions else (caches,)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shapes = (opened, {1: more}, *rest)
        options = {"dynamic_shapes": shapes, "input_names": names, "output_names": outputs, "verbose": False}
        program = torch.onnx.export(Decoder(model, positions), example, dynamo=True, **options)
        program.save(path, external_data=True)
    return path


def by_tracing(model: nn.Module, path: Path, positions: bool = True) -> Path:
    """The exporter by traces that Optimum uses: batch, tokens and past are all open, and sizes are computed in the graph. Opset 17."""
    example, names, outputs = _example(model, positions)
    opened = {name: {0: "batch", 1: "tokens"} for name in ("input_ids", "position_ids", "logits")}
    opened |= {"attention_mask": {0: "batch", 1: "all"}} | {name: {0: "batch", 2: "past"} for name in names if "past" in name}
    opened |= {name: {0: "batch", 2: "all"} for name in outputs[1:]}
    opened = {name: axes for name, axes in opened.items() if name in names + outputs}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Decoder(model, positions), example, path, dynamo=False, opset_version=17, input_names=names, output_names=outputs, dynamic_axes=opened
        )
    return path


def onnxruntime_logits(path: Path, ids: Sequence[int]) -> np.ndarray:
    """Logits [T, V] of one token after another, caches growing from nothing."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    inputs = [one.name for one in session.get_inputs()]
    pasts = {one.name: one.shape for one in session.get_inputs() if "past" in one.name}
    caches = {name: np.zeros((1, shape[1], 0, shape[3]), np.float32) for name, shape in pasts.items()}
    logits = []
    for position, token in enumerate(ids):
        known = {"input_ids": np.array([[token]]), "attention_mask": np.ones((1, position + 1), np.int64), "position_ids": np.array([[position]])}
        found = session.run(None, {**{name: value for name, value in known.items() if name in inputs}, **caches})
        logits.append(found[0][0, 0])
        caches = dict(zip(caches, found[1:], strict=True))
    return np.stack(logits)
