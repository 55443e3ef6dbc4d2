"""Kernels of models without weights: all passes of a compile, and nothing packed or built."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from kogc.compile_passes import Planned, plan
from kogc.dump import Dump
from kogc.frontend.load import load_model
from kogc.frontend.model_input import ModelInput, digest, reference_module
from kogc.frontend.sources import MissingWeights
from kogc.targets import Target

#: Positions to plan for where the context does not matter: rope tables of 131,072 positions take longer to trace than all the rest.
CONTEXT = 4096


def model_of(config: Mapping[str, Any], context: int | None = None) -> ModelInput:
    """A reference model of ``config`` on the meta device."""
    module, context, shapes = reference_module(config, "the model", context)
    weights = MissingWeights(shapes, "the model")
    return ModelInput("model", module, weights, config, None, None, (), None, context, digest(str(config)), "bf16")


@cache
def preset_of(name: str, context: int | None = CONTEXT) -> ModelInput:
    """The preset ``name`` without weights, for at most ``context`` positions."""
    whole = load_model(f"preset:{name}")
    return whole if context is None or whole.context <= context else load_model(f"preset:{name}", max_context=context)


def planned(model: ModelInput, target: Target, workers: int, dtype: str = "bf16") -> Planned:
    return plan(model, dtype, workers, target, Dump(None), lambda step, done, total: None)
