"""Fuse: cut a decode graph into stages. A stage begins only where a worker needs what another worker made."""

from __future__ import annotations

from dataclasses import replace

from kogc.ir.graph import Graph
from kogc.ir.passes.fuse_attention import to_stage_level, with_splits
from kogc.ir.passes.fuse_names import Namer, parse_key, uncut_key
from kogc.ir.passes.fuse_place import Draft, Placement, place
from kogc.ir.stages import PartGroup, StageGroup, StagePlan


def fuse(graph: Graph, splits: int = 1) -> StagePlan:
    """The stages of a decode graph. Attention is cut into ``splits`` parts of the context.

    Linears that read one vector form one stage. Row-wise ops follow the newest of their operands into its epilogue;
    everything that needs whole vectors is computed by every worker in the prologue of the stage that wants it.

    Raises:
        GraphError: the graph needs a placement that stages cannot express yet; names op and source.
    """
    staged = to_stage_level(graph.without_dead_nodes(), splits)
    placement = place(staged)
    namer = Namer(node.attrs["key"] for node in staged if node.op == "weight")
    groups: list[StageGroup] = []
    for draft in placement.stages:
        groups.append(_named(staged, _group(staged, placement, draft), groups, placement, namer))
    return StagePlan(staged, tuple(groups))


def set_splits(plan: StagePlan, splits: int) -> StagePlan:
    """The same stages with every attention cut into ``splits`` parts of the context."""
    return StagePlan(with_splits(plan.graph, splits), plan.stages)


def _group(graph: Graph, placement: Placement, draft: Draft) -> StageGroup:
    parts = tuple(
        PartGroup(
            tuple(part.linears),
            tuple(part.epilogue),
            tuple(name for name in part.made(draft) if _leaves(graph, placement, name, draft.index)),
        )
        for part in draft.parts
    )
    shared = (name for name in draft.prologue if placement.of[name].role == "prologue")
    published = tuple(name for name in shared if _leaves(graph, placement, name, draft.index))
    return StageGroup("", draft.kind, tuple(draft.prologue), published, draft.vector, draft.core, parts)


def _leaves(graph: Graph, placement: Placement, name: str, stage: int) -> bool:
    """Whether the value of ``name`` is wanted outside ``stage``: by another stage, as result, or as state."""
    if name in graph.outputs or graph[name].op == "kv_append":
        return True
    return any(placement.of[user.name].stage != stage for user in graph.users(name) if user.name in placement.of)


# ── names ──


def _named(graph: Graph, group: StageGroup, before: list[StageGroup], placement: Placement, namer: Namer) -> StageGroup:
    if group.kind == "sample":
        return replace(group, name="sample", title="sample: the next token")
    if group.kind == "attention":
        query = placement.of[graph[group.core].inputs[0]]
        linears = query.part.linears
        block = namer.block([weight_key(graph, linears[0])]) if linears else before[query.stage].block
        name = f"{block}_attend" if block else "attend"
        return replace(group, name=name, title=f"{block}: attention", block=block, layer=before[query.stage].layer)
    keys = weight_keys(graph, group)
    embedding = before[0].core and weight_key(graph, before[0].core) if before else None
    if [uncut_key(key) for key in keys] == [embedding]:
        # A tied head would be called after the embedding table.
        keys = [graph[group.parts[0].linears[0]].module or "lm_head"]
    layer = parse_key(keys[0]).layer
    return replace(group, name=namer.stage(keys), title=namer.title(keys), block=namer.block(keys), layer=layer)


def weight_keys(graph: Graph, group: StageGroup) -> list[str]:
    """What a group is called after: keys of its linears, of its embedding table, or of the vectors that its rows go with."""
    if group.kind == "rows":
        return _vector_keys(graph, group)
    linears = [name for part in group.parts for name in part.linears]
    return [weight_key(graph, name) for name in linears or [group.core]]


def _vector_keys(graph: Graph, group: StageGroup) -> list[str]:
    """Keys of norm scales and the like; where there are none, the modules that make the rows."""
    nodes = [graph[name] for name in (*group.prologue, *(name for part in group.parts for name in part.epilogue))]
    keys = [operand.attrs["key"] for node in nodes for operand in graph.operands(node) if operand.op == "weight"]
    return list(dict.fromkeys(keys or [node.module or node.op for node in nodes]))


def weight_key(graph: Graph, name: str) -> str:
    """Key of the matrix that the linear or embed node ``name`` reads."""
    return graph[graph[name].inputs[1]].attrs["key"]

