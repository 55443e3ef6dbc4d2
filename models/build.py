"""From a configuration dict to a reference module."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from kogc.models.config import ConfigError, LaneformerConfig, LlamaConfig
from kogc.models.laneformer import Laneformer
from kogc.models.llama import Llama

MODEL_TYPES = {
    "laneformer": (LaneformerConfig, Laneformer),
    "laneformer_tp": (LaneformerConfig, Laneformer),
    "llama": (LlamaConfig, Llama),
}


def parse_config(config: Mapping[str, Any]) -> LaneformerConfig | LlamaConfig:
    """The typed configuration that `config["model_type"]` asks for.

    Raises:
        ConfigError: the type is missing or unknown, or a field is wrong.
    """
    return _entry(config)[0].from_dict(config)


def build_model(config: Mapping[str, Any], capacity: int) -> nn.Module:
    """The reference module for a configuration dict, with KV caches of `capacity` positions.

    Weights are random (or on meta, under `torch.device("meta")`). Call `.to(dtype)` before loading half-precision
    weights, so that caches and parameters agree.

    Raises:
        ConfigError: the type is missing or unknown, or a field is wrong.
        ValueError: `capacity` is below 1.
    """
    config_class, model_class = _entry(config)
    return model_class(config_class.from_dict(config), capacity)


def required_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a checkpoint for `config` must hold, in the module's order.

    Raises:
        ConfigError: the type is missing or unknown, or a field is wrong.
    """
    with torch.device("meta"):
        model = build_model(config, capacity=1)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _entry(config: Mapping[str, Any]) -> tuple[type, type]:
    name = config.get("model_type")
    if not isinstance(name, str) or name not in MODEL_TYPES:
        raise ConfigError(f"`model_type` is {name!r}, expected one of {', '.join(MODEL_TYPES)}")
    return MODEL_TYPES[name]
