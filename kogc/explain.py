"""What kogc makes of a model, found out without its weights: `kogc explain`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kogc.compile_passes import decode_graph
from kogc.dump import Dump
from kogc.explain_layers import LayerGroup, layer_groups
from kogc.frontend.load import load_model
from kogc.frontend.model_input import ModelInput
from kogc.frontend.trace import trace
from kogc.ir.graph import GraphError
from kogc.ir.passes.fuse import fuse
from kogc.ir.passes.partition import partition
from kogc.ir.passes.recognize import UnrecognizedOp, find_problems
from kogc.ir.passes.roll import roll
from kogc.ir.passes.views import separate_views
from kogc.targets import target_facts, target_names
from kogc.traffic import ELEMENT_BYTES, Traffic, traffic
from kogc.verify import Progress

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Problem:
    """Something that is not understood. ``source`` is ``file:line: code`` of the model; ``count`` nodes have come from there."""

    op: str
    module: str | None
    why: str
    source: str | None
    count: int


@dataclass(frozen=True)
class Prediction:
    """``tok_s`` of a machine that streams a token's bytes without gaps at its measured ceiling: no kernel is faster,
    unless the model fits into a cache."""

    target: str
    title: str
    bandwidth_gb_s: float
    tok_s: float


@dataclass(frozen=True)
class Explanation:
    """``parameters`` are counted once each, ``weight_bytes`` is what they take in ``dtype``. ``traffic`` is that of one token at
    context ``position``. With ``problems`` there are no ``layers``, no ``traffic`` and no ``predictions``."""

    model: str
    dtype: str
    parameters: int
    weight_bytes: int
    context: int | None
    problems: tuple[Problem, ...]
    layers: tuple[LayerGroup, ...] = ()
    traffic: Traffic | None = None
    position: int = 0
    predictions: tuple[Prediction, ...] = ()

    @property
    def supported(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """What ``kogc explain --json`` prints."""
        plain = dataclasses.asdict(self)
        return {"schema": 1, "supported": self.supported, **plain}


def explain(
    model_or_path: str | Path | nn.Module,
    *,
    dtype: str | None = None,
    max_context: int | None = None,
    position: int | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Explanation:
    """Trace and recognise a model, and say what its kernel would be made of. No weight is read.

    Args:
        model_or_path: as for ``kogc.compile``; a folder needs no more than its ``config.json``.
        dtype: storage type the sizes are told for; by default the model's own.
        max_context: positions of the KV cache; by default all the model has.
        position: context position the traffic is counted at; by default half the context.
        allow_pickle: unpickle a whole module, which runs code from the file.
        trust_remote_code: run the model code that a Hugging Face folder brings along.
        progress: called with what is being done.

    Raises:
        BadInput, FrontendError: the model cannot be read or traced.
    """
    tell = progress or (lambda step, done, total: None)
    tell("reading the model", 0, 0)
    model = load_model(model_or_path, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code, max_context=max_context, weights=False)
    stored = dtype or ("fp32" if model.dtype == "fp64" else model.dtype)
    count = sum(parameter.numel() for parameter in model.module.parameters())
    known = Explanation(model.name, stored, count, count * ELEMENT_BYTES[stored], model.context, ())
    try:
        return _explained(model, known, position, tell)
    except GraphError as error:
        return dataclasses.replace(known, problems=tuple(_problems(model, error)))


def _explained(model: ModelInput, known: Explanation, position: int | None, tell: Progress) -> Explanation:
    graph = decode_graph(model, Dump(None), tell)
    tell("planning", 0, 0)
    part = partition(graph)
    stages = fuse(separate_views(part).graph)
    context = model.context or graph.meta["capacity"]
    program = roll(stages, context, known.dtype, (1,), model.name)
    at = min(context - 1, context // 2 if position is None else position)
    bytes_read = traffic(program, at)
    return dataclasses.replace(
        known, context=context, layers=tuple(layer_groups(stages, ELEMENT_BYTES[known.dtype])), traffic=bytes_read, position=at,
        predictions=tuple(_predictions(bytes_read)),
    )


def _predictions(bytes_read: Traffic) -> Iterator[Prediction]:
    for name in target_names():
        facts: Mapping[str, Any] = target_facts(name)
        if "bandwidth_gb_s" in facts:
            ceiling = float(facts["bandwidth_gb_s"])
            yield Prediction(name, facts["title"], ceiling, bytes_read.tokens_per_second(ceiling))


def _problems(model: ModelInput, first: GraphError) -> list[Problem]:
    """Everything that is wrong with the model's graph, equal lines of its code once; at least the error that was met first."""
    errors: list[GraphError] = find_problems(trace(model.module, model.context, name=model.name)) if isinstance(first, UnrecognizedOp) else []
    found: dict[tuple, Problem] = {}
    for error in errors or [first]:
        problem = _problem(error)
        known = found.setdefault((problem.op, problem.why, problem.source), problem)
        if known is not problem:
            found[problem.op, problem.why, problem.source] = dataclasses.replace(known, count=known.count + 1)
    return list(found.values())


def _problem(error: GraphError) -> Problem:
    if isinstance(error, UnrecognizedOp):
        return Problem(error.node.op, error.node.module, error.why, error.node.source, 1)
    return Problem("", None, str(error), None, 1)
