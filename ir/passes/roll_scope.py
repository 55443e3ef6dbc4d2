"""For how many lanes a worker computes each prologue value: only its run's own lane, or all of them."""

from __future__ import annotations

from collections.abc import Mapping

from kogc.ir.graph import Graph
from kogc.ir.passes.fuse_place import LANE_REDUCTIONS
from kogc.ir.stages import StageGroup


def prologue_scopes(graph: Graph, group: StageGroup, stage_lanes: int) -> Mapping[str, str]:
    """``own`` or ``all`` for every value the prologue computes or reads. Values without lanes count as ``own``."""
    # A stage without lanes that needs a value with lanes needs every lane of it.
    wanted = "own" if stage_lanes > 1 else "all"
    scopes = {name: wanted for name in (group.vector, *group.prologue_outputs)}
    for part in group.parts:
        scopes |= {name: wanted for name in part.outputs}
        for name in part.epilogue:
            scopes |= {operand: wanted for operand in graph[name].inputs}
    for name in reversed(group.prologue):
        node = graph[name]
        crosses = node.op in LANE_REDUCTIONS or node.op == "lane_concat"
        need = "all" if crosses else scopes[name]
        for operand in node.inputs:
            if need == "all" or operand not in scopes:
                scopes[operand] = need
    return scopes
