"""How the warps of a worker take in the vector of a stage's dots, on machines whose exchanged words carry their own flags.

In the usual case every warp polls by itself what its own dots will need, norms it and packs it, and the worker's threads meet
once, after the dots. Other vectors are received and computed by all threads together first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kogc.codegen.layout import numbered_stages, stage_places
from kogc.ir.program import Operand, OpSpec, Program, Schedule, Stage, WorkerStage
from kogc.ir.types import NUMPY_DTYPES
from kogc.targets import DotRules


@dataclass(frozen=True)
class FirstUnits:
    """The units that all workers which have any begin a stage of one part with: ``least`` of them. ``everyone``: no worker is without
    work in the stage. ``drains``: a warp can take their weights before the vector is there."""

    least: int
    everyone: bool
    drains: bool


@dataclass(frozen=True)
class Intake:
    """The vector of one stage's dots. ``operand``: the value that every warp polls by itself, None where the worker receives and
    computes the vector; ``norm``: the op between the two. ``warps`` share a unit. ``batched``: all that a worker does is
    done in one go; ``held``: and the vector never leaves a warp's registers. Else ``floats`` hold it packed, ``copied`` once for
    every team of warps. ``first``: what the call that takes the vector in takes dots of, too, if anything. ``short``: no worker
    reads much in the stage."""

    operand: Operand | None
    norm: OpSpec | None
    warps: int
    floats: int
    copied: bool
    batched: bool
    held: bool
    first: FirstUnits | None
    short: bool


def make_intakes(program: Program, schedule: Schedule, rules: DotRules) -> tuple[Intake | None, ...]:
    """By stage number; None for stages without dots."""
    return tuple(
        _intake(stage, schedule.work[segment][place], rules, program.dtype, schedule.tile_rows) if stage.kind == "matvec" else None
        for (_, _, stage), (segment, place) in zip(numbered_stages(program), stage_places(program), strict=True)
    )


def late_values(stage: Stage) -> set[str]:
    """Values that are read after the worker's threads last met: by epilogues, by shares, and all that stages without dots read."""
    names = stage.read_after | {output.value for output in stage.prologue_outputs}
    if stage.kind in ("combine", "rows"):
        names |= {value.name for value in (*stage.operands, *stage.prologue)}
    return names


def _intake(stage: Stage, work: Sequence[Sequence[WorkerStage]], rules: DotRules, dtype: str, tile_rows: int) -> Intake:
    visits = [units for instance in work for one in instance for units in _visits(one)]
    k = stage.parts[0].k
    warps = rules.sharing(k, max(visits, default=1))
    one_lane = one_lane_each(work)
    operand, norm = _polled(stage) if one_lane else (None, None)
    batched = one_lane and max(visits, default=0) <= rules.batch_units and not _skipped(stage) and not stage.prologue_outputs
    floats, copied = rules.packed_floats(k, warps)
    first = _first_units(work, rules.drains(k, warps, dtype)) if operand and batched and len(stage.parts) == 1 else None
    held = first is not None and norm is None and stage.parts[0].arity == 1 and rules.holds(k, warps, dtype)
    tiles = (sum(stage.parts[run.part].arity * run.count for run in one.runs) for instance in work for one in instance)
    most = max(tiles, default=0) * tile_rows * k * NUMPY_DTYPES[dtype].itemsize
    return Intake(operand, norm, warps, 0 if held else floats, copied, batched, held, first if held or norm else None, most < rules.short_bytes)


def _first_units(work: Sequence[Sequence[WorkerStage]], drains: bool) -> FirstUnits:
    everyone = [sum(run.count for run in one.runs) for instance in work for one in instance]
    return FirstUnits(min(filter(None, everyone), default=0), all(everyone), drains)


def _skipped(stage: Stage) -> bool:
    """Whether steps whose logits nobody wants pass over some of the dots."""
    return any(output.kind == "logits" for part in stage.parts for output in part.outputs)


def _visits(work: WorkerStage) -> Iterator[int]:
    """Units of each lane that a worker visits."""
    for lane in dict.fromkeys(run.lane for run in work.runs):
        yield sum(run.count for run in work.runs if run.lane == lane)


def one_lane_each(work: Sequence[Sequence[WorkerStage]]) -> bool:
    """Whether no worker visits several lanes: it would publish for the first one before it reads for the second."""
    return all(len({run.lane for run in one.runs}) <= 1 for instance in work for one in instance)


def _polled(stage: Stage) -> tuple[Operand | None, OpSpec | None]:
    """The operand that the dots' vector is, or is after a norm; (None, None) when it is anything else, or read elsewhere, too."""
    operands = {operand.name: operand for operand in stage.operands}
    norm = next((op for op in stage.prologue if op.name == stage.vector and op.op == "rms_norm" and not op.attrs.get("group")), None)
    source = operands.get(norm.inputs[0] if norm else stage.vector)
    others = [op for op in stage.prologue if op is not norm]
    if source is None or others or {source.name, stage.vector} & late_values(stage) or source.access not in ("lane", "rank"):
        return None, None
    return source, norm
