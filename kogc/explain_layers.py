"""The stages of a model's layers as a reader wants them: layers that are alike once, with what is fused into what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from kogc.ir.graph import Graph
from kogc.ir.stages import StageGroup, StagePlan

_ATTENTION = "attention_partial"


@dataclass(frozen=True)
class FusedStage:
    """One stage of a layer. ``first`` are the ops every worker computes on whole vectors, ``products`` the matrices
    [rows, columns] it streams, ``then`` the ops behind each of them; ``bytes`` of weights a token makes it read. ``detail``
    tells what attention does."""

    name: str
    kind: str
    first: tuple[str, ...]
    products: tuple[tuple[int, int], ...]
    then: tuple[str, ...]
    bytes: int
    detail: str


@dataclass(frozen=True)
class LayerGroup:
    """Layers with the same stages: ``name`` is ``layers 0–4, 6–10``, or the stage's own name outside the layers. ``recognised``
    counts the decode ops of one of them."""

    name: str
    count: int
    recognised: dict[str, int]
    stages: tuple[FusedStage, ...]


def layer_groups(plan: StagePlan, element_bytes: int) -> list[LayerGroup]:
    """The groups in the order of their first layers. Stages outside the layers are groups of their own."""
    groups: dict[object, tuple[list[str | None], tuple[FusedStage, ...], dict[str, int]]] = {}
    for layer, stages in _by_layer(plan):
        fused = tuple(_fused(plan.graph, stage, element_bytes) for stage in stages)
        key = (fused, layer is not None)
        groups.setdefault(key, ([], fused, _recognised(plan.graph, stages)))[0].append(layer)
    return [LayerGroup(_name(layers, fused), len(layers), counts, fused) for layers, fused, counts in groups.values()]


def _by_layer(plan: StagePlan) -> Iterator[tuple[str | None, list[StageGroup]]]:
    here: list[StageGroup] = []
    for stage in plan.stages:
        if here and (stage.layer is None or stage.layer != here[0].layer):
            yield here[0].layer, here
            here = []
        here.append(stage)
    if here:
        yield here[0].layer, here


def _fused(graph: Graph, stage: StageGroup, element_bytes: int) -> FusedStage:
    linears = [graph[name] for part in stage.parts for name in part.linears]
    shapes = [(int(prod(node.type.shape[1:])), int(graph[node.inputs[1]].type.shape[-1])) for node in linears]
    then = tuple(graph[name].op for part in stage.parts for name in part.epilogue)
    first = tuple(graph[name].op for name in stage.prologue)
    detail = _attention(graph, stage) if stage.kind == "attention" else ""
    return FusedStage(stage.name, stage.kind, first, tuple(shapes), then, sum(map(prod, shapes)) * element_bytes, detail)


def _attention(graph: Graph, stage: StageGroup) -> str:
    attrs = graph[stage.core].attrs
    seen = f"window {attrs['window']}" if attrs.get("window") else "all positions"
    cap = f", soft-cap {attrs['softcap']:g}" if attrs.get("softcap") else ""
    return f"{attrs['heads']} / {attrs['kv_heads']} heads of {attrs['head_dim']}, {seen}{cap}"


def _recognised(graph: Graph, stages: list[StageGroup]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for stage in stages:
        names = (*stage.prologue, stage.core, *(name for part in stage.parts for name in (*part.linears, *part.epilogue)))
        for op in (graph[name].op for name in names if name):
            if op != "attention_combine":  # the other half of an attention
                op = "attention" if op == _ATTENTION else op
                counts[op] = counts.get(op, 0) + 1
    return counts


def _name(layers: list[str | None], stages: tuple[FusedStage, ...]) -> str:
    if layers[0] is None:
        return stages[0].name
    root = layers[0].rpartition(".")[0]
    return f"{root} {_ranges([int(layer.rpartition('.')[2]) for layer in layers])}"


def _ranges(numbers: list[int]) -> str:
    """``0–4, 6, 8–9``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{low}–{high}" if high > low else str(low) for low, high in runs)
