"""Transformers models of a ``Shape`` with weights that matter."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from shapes import Shape


def config_of(shape: Shape) -> Any:
    return getattr(transformers, shape.config)(**shape.fields)


def random_model(shape: Shape, seed: int = 0) -> torch.nn.Module:
    """The causal language model in fp32. Norms scale, biases shift and attention attends: nothing may be left out unnoticed."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config_of(shape), dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            width = 1 if parameter is model.get_input_embeddings().weight else parameter.shape[-1]
            value = torch.randn(parameter.shape) * width**-0.5
        elif name.endswith("bias"):
            value = 0.3 * torch.randn(parameter.shape)
        else:
            value = 0.5 + torch.rand(parameter.shape)
        parameter.data = value
    return model
