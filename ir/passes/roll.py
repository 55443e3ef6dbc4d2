"""Roll: stages of equal layers become loops, values that cross stages become numbered writes of buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kogc.ir.graph import Graph, GraphError
from kogc.ir.passes.fuse_names import Namer, Unique, identifier
from kogc.ir.passes.roll_buffers import Body, BufferPlan, make_buffers
from kogc.ir.passes.roll_meta import program_meta
from kogc.ir.passes.roll_segments import Span, find_spans
from kogc.ir.passes.roll_stage import PROLOGUE, StageDraft, draft_stage, lanes_of
from kogc.ir.program import Buffer, Cache, Part, Program, Segment, Stage
from kogc.ir.stages import StagePlan
from kogc.ir.types import FLOAT_DTYPES


def roll(plan: StagePlan, capacity: int, dtype: str, step_tokens: Sequence[int] = (1,), model: str = "model") -> Program:
    """The program of a stage plan.

    Args:
        plan: what ``fuse`` made.
        capacity: context positions the caches hold.
        dtype: storage dtype of weights and caches.
        step_tokens: numbers of tokens a step may process.
        model: the model's name, for reports.

    Raises:
        GraphError: ``capacity`` exceeds a position table of the graph.
        ValueError: ``dtype`` is no float storage dtype, or ``step_tokens`` is empty or not positive.
    """
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"dtype is {dtype!r}, expected one of {', '.join(FLOAT_DTYPES)}")
    if not step_tokens or min(step_tokens) < 1:
        raise ValueError(f"step_tokens is {tuple(step_tokens)}, expected positive numbers")
    graph = plan.graph
    _check_capacity(graph, capacity)
    namer = Namer(node.attrs["key"] for node in graph if node.op == "weight")
    drafts = [draft_stage(graph, group, namer) for group in plan.stages]
    buffers = _plan_buffers(graph, drafts)
    segments = _segments(drafts, buffers)
    program = Program(
        model, dtype, _vocab(graph), capacity, tuple(step_tokens), (), _caches(graph, capacity), segments
    )  # fmt: skip
    instances = ((iteration, stage) for _, iteration, _, stage in program.instances())
    program = replace(program, buffers=make_buffers(instances, _forms(graph, buffers)))
    return replace(program, meta=program_meta(graph, program))


def _plan_buffers(graph: Graph, drafts: Sequence[StageDraft]) -> BufferPlan:
    """Find loops; cut those whose reads cannot be written as base + stride · iteration until all can."""
    spans = find_spans([draft.signature for draft in drafts], [draft.group.layer for draft in drafts])
    while True:
        buffers = BufferPlan(graph, drafts, spans)
        if buffers.unaffine is None:
            return buffers
        index, iteration = buffers.unaffine
        spans[index : index + 1] = spans[index].cut(iteration)


# ── segments and stages ──


def _segments(drafts: Sequence[StageDraft], buffers: BufferPlan) -> tuple[Segment, ...]:
    unique = Unique()
    segments = []
    for body in buffers.bodies:
        names = Unique()
        stages = tuple(_rolled(drafts, buffers, body, number, names) for number in range(body.span.period))
        segments.append(Segment(unique(_segment_name(drafts, body.span)), body.span.count, stages))
    return tuple(segments)


def _segment_name(drafts: Sequence[StageDraft], span: Span) -> str:
    """``layers_0_15`` for a loop over layers, else the name of its first stage."""
    first, last = drafts[span.first].group, drafts[span.last - 1].group
    if first.layer is None:
        return first.name
    number = (last.layer or first.layer).rpartition(".")[2]
    name = identifier(first.layer.replace(".", "_"))
    return name if first.layer == last.layer else f"{name}_{number}"


def _rolled(drafts: Sequence[StageDraft], buffers: BufferPlan, body: Body, number: int, names: Unique) -> Stage:
    """One stage for all iterations of a loop."""
    turns = [drafts[body.span.first + number + body.span.period * i].stage for i in range(body.span.count)]
    first = turns[0]
    operands = []
    for index, operand in enumerate(first.operands):
        buffer, write = buffers.read([turn.operands[index].buffer for turn in turns])
        operands.append(replace(operand, buffer=buffer, write=write))
    stage = replace(
        first,
        name=names(first.name),
        operands=tuple(operands),
        consts=tuple(replace(c, keys=_merged([t.consts[i].keys for t in turns])) for i, c in enumerate(first.consts)),
        prologue_outputs=buffers.outputs(body, number, PROLOGUE),
        parts=tuple(_rolled_part(turns, index, buffers, body, number) for index in range(len(first.parts))),
    )
    if first.attention:
        tables = {name: tuple(getattr(t.attention, name)[0] for t in turns) for name in ("caches", "windows")}
        (output,) = buffers.outputs(body, number, 0)
        stage = replace(stage, attention=replace(first.attention, output=output, **tables))
    return _operands_named(stage)


def _rolled_part(turns: Sequence[Stage], index: int, buffers: BufferPlan, body: Body, number: int) -> Part:
    parts = [turn.parts[index] for turn in turns]
    matrices = (replace(m, keys=_merged([part.matrices[i].keys for part in parts])) for i, m in enumerate(parts[0].matrices))
    return replace(parts[0], matrices=tuple(matrices), outputs=buffers.outputs(body, number, index))


def _merged(keys: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """One key per iteration, or one for all where they are equal."""
    flat = tuple(key for (key,) in keys)
    return flat[:1] if len(set(flat)) == 1 else flat


def _operands_named(stage: Stage) -> Stage:
    """Operands named after their buffers instead of provisionally."""
    fixed = [spec.name for spec in (*stage.prologue, *(s for part in stage.parts for s in part.epilogue))]
    unique = Unique((*fixed, *(const.name for const in stage.consts)))
    new = {operand.name: unique(operand.buffer) for operand in stage.operands}
    rename = lambda name: new.get(name, name)
    specs = lambda ops: tuple(replace(op, inputs=tuple(map(rename, op.inputs))) for op in ops)
    return replace(
        stage,
        operands=tuple(replace(operand, name=new[operand.name]) for operand in stage.operands),
        prologue=specs(stage.prologue),
        vector=stage.vector and rename(stage.vector),
        parts=tuple(replace(part, epilogue=specs(part.epilogue)) for part in stage.parts),
        attention=stage.attention and replace(stage.attention, q=rename(stage.attention.q)),
    )


# ── tables ──


def _forms(graph: Graph, buffers: BufferPlan) -> dict[str, Buffer]:
    """Every buffer with payload, lanes and width, in order of its first write."""
    forms: dict[str, Buffer] = {}
    for body in buffers.bodies:
        for site, values in zip(body.sites, body.written, strict=True):
            name = buffers.buffer_of(values[0])
            if name not in forms:
                forms[name] = _form(graph, name, site.kind, values[0])
    return forms


def _form(graph: Graph, name: str, kind: str, value: str) -> Buffer:
    node = graph[value]
    if kind == "logits":
        return Buffer(name, "best", 1, 1, 0, 0)
    payload = {"cache": "cache"}.get(kind, "partials" if node.op == "attention_partial" else "vector")
    shown = graph[node.inputs[1]] if kind == "cache" else node
    return Buffer(name, payload, lanes_of(shown.type), int(shown.type.shape[-1]), 0, 0)


def _caches(graph: Graph, capacity: int) -> tuple[Cache, ...]:
    shapes = ((node.attrs["key"], node.type.shape) for node in graph if node.op == "cache")
    return tuple(Cache(key, shape[0], shape[2], capacity) for key, shape in shapes)


def _vocab(graph: Graph) -> int:
    return int(graph[graph.outputs[0]].type.shape[-1])


def _check_capacity(graph: Graph, capacity: int) -> None:
    for node in graph:
        if node.op == "table" and node.type.shape[0] < capacity:
            raise GraphError(f"table {node.attrs['key']} ends at position {node.type.shape[0]}, the capacity is {capacity}")
