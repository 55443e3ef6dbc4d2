"""Running a stage plan: every stage sees only leaves, published values and what it made itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from kogc.ir.graph import LEAF_OPS, GraphError, where
from kogc.ir.interpret import Result, cache_key, interpret
from kogc.ir.stages import StageGroup, StagePlan
from kogc.ir.weights import WeightSource


def interpret_plan(
    plan: StagePlan,
    token: np.ndarray,
    position: np.ndarray,
    weights: WeightSource,
    caches: Mapping[str, np.ndarray],
    mode: str = "fp64",
) -> Result:
    """Run one step stage by stage; arguments and result as for ``interpret``.

    Raises:
        GraphError: a stage reads a value that no earlier stage published, or a node is not computed exactly once.
    """
    check_plan(plan)
    published: dict[str, np.ndarray] = {}
    for stage in plan.stages:
        wanted = stage_outputs(stage)
        result = interpret(plan.graph, token, position, weights, caches, mode, overrides=published, want=wanted)
        published |= result.values
    after = dict(caches) | {cache_key(plan.graph, name): published[name] for name in plan.graph.effects}
    return Result({name: published[name] for name in plan.graph.outputs}, after)


def stage_nodes(stage: StageGroup) -> tuple[str, ...]:
    """All nodes a stage computes, in execution order."""
    parts = (name for part in stage.parts for name in (*part.linears, *part.epilogue))
    return (*stage.prologue, *((stage.core,) if stage.core else ()), *parts)


def stage_outputs(stage: StageGroup) -> tuple[str, ...]:
    """Values that leave a stage."""
    outputs = [name for part in stage.parts for name in part.outputs]
    if stage.kind in ("attention", "sample"):
        outputs.append(stage.core)
    return (*stage.prologue_outputs, *outputs)


def check_plan(plan: StagePlan) -> None:
    """Raise GraphError unless every node is computed once and reads only what it can see: leaves, what earlier stages
    published, its stage's prologue and earlier nodes of its own part."""
    computed: set[str] = set()
    published: set[str] = set()
    for index, stage in enumerate(plan.stages):
        title = f"stage {index} ({stage.name})"
        ahead = (*stage.prologue, *((stage.core,) if stage.core else ()))
        for names in _sequences(ahead, stage):
            _check_sequence(plan, names, published, title)
        for name in stage_nodes(stage):
            if name in computed:
                raise GraphError(f"{title} computes {name} ({plan.graph[name].op}) again{where(plan.graph[name])}")
            computed.add(name)
        published |= set(stage_outputs(stage))
    missing = [node.name for node in plan.graph if node.op not in LEAF_OPS and node.name not in computed]
    if missing:
        raise GraphError(f"no stage computes {', '.join(missing)}")


def _sequences(ahead: tuple[str, ...], stage: StageGroup) -> Iterator[tuple[str, ...]]:
    """What one worker computes in one go: the prologue, then one part."""
    yield ahead
    yield from ((*ahead, *part.linears, *part.epilogue) for part in stage.parts)


def _check_sequence(plan: StagePlan, names: tuple[str, ...], published: set[str], title: str) -> None:
    visible = set(published)
    for name in names:
        for operand in plan.graph[name].inputs:
            if operand not in visible and plan.graph[operand].op not in LEAF_OPS:
                raise GraphError(f"{title}: {name} ({plan.graph[name].op}) reads {operand}, which no earlier stage published")
        visible.add(name)
