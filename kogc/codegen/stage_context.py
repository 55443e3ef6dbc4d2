"""What the templates are told of one stage: names, sizes and the order of things. The code itself is in the templates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from kogc.codegen.intake import FirstUnits, Intake
from kogc.codegen.layout import Layout, computed_once, stage_outputs
from kogc.codegen.names import Scope, float_literal
from kogc.codegen.stage_parts import PartContext, probe_at, part_context
from kogc.codegen.stage_values import RenderError, StageValues
from kogc.codegen.staging import Staging
from kogc.codegen.tables import shares_once, shares_own
from kogc.ir.program import OpSpec, Program, Segment, Stage


@dataclass(frozen=True)
class Prologue:
    """One prologue op: ``ins`` and ``out`` are float* expressions for column t, ``args`` the vecs at i of the same
    operands, ``ins_other`` the operands in lane ``other``; ``loops`` computes every lane, called ``each``."""

    op: str
    attrs: Any
    width: int
    lanes: int
    lane: str
    loops: bool
    is_value: bool
    out: str
    ins: tuple[str, ...]
    ins_other: tuple[str, ...]
    args: tuple[str, ...]
    in_lanes: tuple[int, ...]
    in_widths: tuple[int, ...]


@dataclass(frozen=True)
class ShareContext:
    """A prologue output of which each worker publishes some rows: ``number`` among the outputs."""

    number: int
    value: str
    to: str
    write: str
    probe: str | None


@dataclass(frozen=True)
class AttentionContext:
    """The attention core: ``q``, ``out``, ``new_keys`` and ``new_values`` (of the lane, made in this step) are expressions of
    rows of column t, ``keys`` and ``values`` the caches, in which the lane is ``own_lane``."""

    kv_heads: int
    group: int
    head_dim: int
    cache_pitch: int
    splits: int
    scale: float
    softcap: float
    q: str
    out: str
    keys: str
    values: str
    new_keys: str
    new_values: str
    write: str
    probe: str
    own_lane: str


@dataclass(frozen=True)
class CombineContext:
    """The heads of a lane whose splits a stage brings together; ``records`` is the float* expression of column t."""

    heads: int
    head_dim: int
    splits: int
    records: str


@dataclass(frozen=True)
class ActivationContext:
    """How the dots' vector is made ready: a call; ``once`` for the stage, or for every lane a worker visits. ``polled``: every
    warp receives it in that call; ``batched``: the worker's threads meet once for all parts; ``first``: that call also takes dots, and
    ``drained`` is the type of the weights it takes before. ``ahead``: the same call with weights that were taken in an earlier stage."""

    expression: str
    once: bool
    polled: bool = False
    batched: bool = False
    first: FirstUnits | None = None
    drained: str = ""
    ahead: str = ""


@dataclass(frozen=True)
class StageContext:
    """One stage function. ``summary`` are comment lines: what it waits for and what it publishes. ``drains``: the type of the next
    stage's weights that it takes, ``ahead``: the stage before has taken those of this one (``joined``)."""

    number: int
    name: str
    function: str
    title: str
    segment: str
    kind: str
    first_instance: int
    summary: tuple[str, ...]
    values: StageValues
    caches: tuple[str, ...]
    prologue_once: tuple[Prologue, ...]
    prologue_own: tuple[Prologue, ...]
    shares_once: tuple[ShareContext, ...]
    shares_own: tuple[ShareContext, ...]
    parts: tuple[PartContext, ...]
    attention: AttentionContext | None
    activation: ActivationContext | None
    combine: CombineContext | None
    drains: str = ""
    ahead: bool = False

    @property
    def names_lane(self) -> bool:
        """Whether a worker's record begins with its lane."""
        return any(const.space and const.lanes > 1 for const in self.values.consts)

    @property
    def polled(self) -> bool:
        """Whether every warp takes in the dots' vector by itself, so that the worker's threads meet only after the dots."""
        return self.activation is not None and self.activation.polled

    @property
    def receives_at_once(self) -> bool:
        """Whether nothing can be done before all operands are there. Attention without a prologue reads the plan first."""
        return bool(self.operands) and not self.polled and not self.receives_late

    @property
    def receives_late(self) -> bool:
        return self.kind in ("attention", "combine", "rows") and not self.prologue_once and not self.prologue_own

    @property
    def batched(self) -> bool:
        """Whether a worker visits one lane at most, and does everything there in one batch."""
        return self.activation is not None and self.activation.batched

    @property
    def operands(self):
        return self.values.operands

    @property
    def consts(self):
        return self.values.consts

    @property
    def writes(self):
        return self.values.writes

    @property
    def scratch(self):
        return self.values.scratch


def joined(contexts: Sequence[StageContext]) -> list[StageContext]:
    """The stages of a program, where a short one takes the first weights of the next: before it waits when it reads no stream itself,
    else after its own dots. All workers must have some of these. Behind a long stage there is room for them in the ring."""
    found = list(contexts)
    for i, (before, after) in enumerate(pairwise(contexts)):
        first = after.activation.first if after.activation else None
        idle = before.kind in ("combine", "rows") or (before.kind == "matvec" and before.batched and before.values.intake.short)
        if first and first.drains and first.everyone and before.segment == after.segment and idle:
            found[i] = replace(found[i], drains=after.activation.drained)
            found[i + 1] = replace(found[i + 1], ahead=True)
    return found


def stage_context(
    program: Program, segment: Segment, stage: Stage, number: int, first_instance: int, layout: Layout, tile_rows: int,
    buffers: Scope, functions: Scope, value_ops: frozenset[str], staging: Staging | None = None,
) -> StageContext:  # fmt: skip
    """Name everything in ``stage``. ``value_ops`` are the ops that are one expression of vecs.

    Raises RenderError for a stage that reads or makes something the templates have no code for.
    """
    values = StageValues(stage, number, segment.count, layout, tile_rows, buffers, staging)
    outputs = [output for output, _ in stage_outputs(stage)]
    for output in outputs:
        values.write_of(output)
    caches = tuple(values.scope.name(f"cache {i}", wish) for i, wish in enumerate(_cache_wishes(stage)))
    prologue = [(op, _prologue(values, op, value_ops)) for op in values.prologue]
    appends = iter(caches)
    parts = tuple(part_context(program, values, part, appends, value_ops) for part in stage.parts)
    return StageContext(
        number, stage.name, functions.name(f"stage {number}", f"stage_{stage.name}"), stage.title, _where(segment), stage.kind,
        first_instance, _summary(stage, outputs), values, caches,
        tuple(made for op, made in prologue if computed_once(op)), tuple(made for op, made in prologue if not computed_once(op)),
        tuple(_share(values, i, "share_lane") for i in shares_once(stage)), tuple(_share(values, i, "lane") for i in shares_own(stage)),
        parts, _attention(program, values, caches) if stage.attention else None,
        _activation(values) if stage.kind == "matvec" else None, _combine(values) if stage.combine else None,
    )  # fmt: skip


def _cache_wishes(stage: Stage) -> tuple[str, ...]:
    if stage.attention:
        return ("keys", "values")
    return tuple(f"{part.name}_cache" for part in stage.parts for output in part.outputs if output.kind == "cache")


def _where(segment: Segment) -> str:
    return f"{segment.name}, {segment.count} times" if segment.count > 1 else segment.name


def _summary(stage: Stage, outputs) -> tuple[str, ...]:
    reads = ", ".join(dict.fromkeys(f"{o.buffer} ({o.access.replace('_', ' ')})" for o in stage.operands))
    makes = ", ".join(dict.fromkeys(output.buffer for output in outputs))
    return tuple(line for line in (f"Waits for {reads}." if reads else "", f"Publishes {makes}." if makes else "") if line)


def _prologue(values: StageValues, op: OpSpec, value_ops: frozenset[str]) -> Prologue:
    loops = op.scope == "all" and op.lanes > 1
    lane = "each" if loops else "lane"
    ins, others, lanes = [], [], []
    data = [name for name in op.inputs if name not in ("token", "position")]
    for name in data:
        constant = values.constant(name, lane)
        ins.append(constant or values.vector(name, lane))
        others.append(constant or values.vector(name, "other"))
        lanes.append(1 if constant else values.lanes(name))
    out = f"{values.scope.name(f'value {op.name}')}.at(t, {'each' if loops else '0'})"
    args = tuple(f"load_at<{op.width}>({pointer}, i)" for pointer in ins)
    return Prologue(
        op.op, op.attrs, op.width, op.lanes, lane, loops, op.op in value_ops, out, tuple(ins), tuple(others), args, tuple(lanes),
        tuple(values.const(name).shape[-1] if values.const(name) else values.width(name) for name in data),
    )  # fmt: skip


def _share(values: StageValues, number: int, lane: str) -> ShareContext:
    output = values.stage.prologue_outputs[number]
    write = values.write_of(output)
    to = f"{write.name}.at(t, {lane})"
    probe = probe_at(values, number, lane)
    return ShareContext(number, values.vector(output.value, lane), to, write.name, probe)


def _combine(values: StageValues) -> CombineContext:
    core = values.stage.combine
    return CombineContext(core.heads, core.head_dim, core.splits, values.vector(core.partials, "lane"))


def _activation(values: StageValues) -> ActivationContext:
    stage, intake, k = values.stage, values.intake, values.stage.parts[0].k
    if intake is not None and intake.operand is not None:
        return _polled(values, intake, k)
    vector = values.vector(stage.vector, "lane").replace(".at(t, ", ".at(0, ")
    once = values.same_for_all_lanes(stage.vector)
    if intake is None:
        return ActivationContext(f"prepare<T, {k}>(w, {vector}, {values.columns(stage.vector)})", once)
    call = f"prepare<T, {k}, {intake.warps}>(w, {vector}, {values.columns(stage.vector)}, {values.packed()})"
    return ActivationContext(call, once, batched=intake.batched)


def _polled(values: StageValues, intake: Intake, k: int) -> ActivationContext:
    """A vector that every warp takes in by itself: ``take_in``, or ``take_in_and_dot`` with the dots of the first run."""
    operand, norm, first = intake.operand, intake.norm, intake.first
    buffer, write = values.buffer_constant(operand.buffer), values.write_number(operand.write)
    row = f"write_of(w, {buffer}, {write}).at(0, {values.lane_in(operand.name, 'lane')})"
    name, shape, vector = "take_in", f"{k}, {intake.warps}", row
    if norm:
        scale = values.constant(norm.inputs[1], "lane") if norm.inputs[1:] else "nullptr"
        offset, eps = float_literal(norm.attrs.get("scale_offset") or 0), float_literal(norm.attrs["eps"])
        name, vector = "take_in_normed", f"{row}, {scale}, {offset}, {eps}"
    if not intake.held:
        vector += f", {values.packed()}"
    if first is None:
        return ActivationContext(f"{name}<{shape}>(w, {vector})", once=False, polled=True, batched=intake.batched)
    arity = values.stage.parts[0].arity
    drained = f"Drained<{arity}, {shape}, {first.least}>"
    shape = f"{arity}, {shape}" if norm else shape
    here, ahead = f"{name}_and_dot<{shape}, {drained}>(w, {vector}, batch)", f"{name}_and_dot<{shape}>(w, ahead, {vector}, batch)"
    return ActivationContext(here, once=False, polled=True, batched=True, first=first, drained=drained, ahead=ahead)


def _attention(program: Program, values: StageValues, caches: tuple[str, ...]) -> AttentionContext:
    core = values.stage.attention
    if core.heads % core.kv_heads:
        raise RenderError(f"stage {values.stage.name}: {core.heads} query heads do not divide over {core.kv_heads} key/value heads")
    write = values.write_of(core.output)
    if write.sent:
        raise RenderError(f"stage {values.stage.name}: attention's partial results cannot be sent to other ranks")
    appended = [operand.name for operand in values.stage.operands if operand.access == "cache"]
    if len(appended) != 2:
        raise RenderError(f"stage {values.stage.name}: keys and values come from {len(appended)} buffers, expected two")
    return AttentionContext(
        core.kv_heads, core.heads // core.kv_heads, core.head_dim, values.layout.cache_pitch(program.dtype, core.head_dim), core.splits, core.scale, core.softcap,
        values.vector(core.q, "lane"), f"{write.name}.at(t, lane)", caches[0], caches[1],
        values.vector(appended[0], "lane"), values.vector(appended[1], "lane"), write.name,
        probe_at(values, len(stage_outputs(values.stage)) - 1, "lane"), values.own_lane,
    )  # fmt: skip
