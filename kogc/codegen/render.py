"""From program and schedule to one self-contained source file and the tables it reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

import kogc.templates
from kogc.codegen.launch import (
    FINISH_REASONS, IN_PROMPT, LAUNCH_VERSION, MODE_GENERATE, MODE_SAMPLE, MODE_TEACHER_FORCED, SAMPLING_FIELDS, STATE_FIELDS, c_struct, launch_fields,
)  # fmt: skip
from kogc.codegen.layout import Layout, ProbeEntry, make_layout, numbered_stages, with_far_memory
from kogc.codegen.names import Scope, float_literal
from kogc.codegen.pack_index import PackIndex
from kogc.codegen.stage_context import StageContext, joined, stage_context
from kogc.codegen.stage_values import RenderError
from kogc.codegen.staging import Staging, make_staging
from kogc.codegen.tables import PlanTables, make_tables
from kogc.codegen.worker_memory import check_worker_memory
from kogc.ir.program import Program, Schedule
from kogc.targets import Target

#: ``launch.fault`` of a fault build.
FAULTS = {"dropped_publish": 1, "wrong_slot": 2, "stuck": 3}

#: Those that need several ranks: what is published stays in its maker's rank.
RANK_FAULTS = {"dropped_send": 4}

#: What ``kogc_query(n)`` of a kernel answers for n = 0, 1, …
QUERIES = (
    "launch_version", "workers", "tile_rows", "columns", "vocab", "capacity",
    "exchange_bytes", "kv_bytes", "probe_floats", "plan_words",
)  # fmt: skip


@dataclass(frozen=True)
class Rendered:
    """A kernel as text and what the host needs beside it. Sizes are bytes, ``probe_floats`` fp32 values.

    ``plan`` is what ``launch.plan`` points to; ``stages`` are names by global stage number, as the abort word gives them;
    ``probe`` describes what a build with ``-DKOGC_PROBE`` leaves in ``launch.probe``.
    """

    source: str
    plan: bytes
    exchange_bytes: int
    kv_bytes: int
    probe: tuple[ProbeEntry, ...]
    probe_floats: int
    stages: tuple[str, ...]


def render(program: Program, schedule: Schedule, target: Target, index: PackIndex) -> Rendered:
    """Emit the kernel of ``program`` for ``target``. ``index`` places streams, tables and constants (``pack_index``).

    Raises RenderError for an op or stage that the templates have no code for, naming both; PlanRejected for a program whose vectors
    are too long for the target's workers.
    """
    if schedule.tile_rows != target.tile_rows:
        raise RenderError(f"the schedule has tiles of {schedule.tile_rows} rows, {target.title} computes with {target.tile_rows}")
    layout, staging, tables = laid_out(program, schedule, target, index)
    if target.memory is not None and staging is not None:
        check_worker_memory(program, staging.near_floats, tables.script_words or 0, target)
    source = _source(program, schedule, target, layout, tables, index, staging)
    stages = tuple(stage.name for _, _, stage in numbered_stages(program))
    return Rendered(source, tables.data, layout.exchange_bytes, layout.kv_bytes, layout.probes, layout.probe_floats, stages)


def laid_out(program: Program, schedule: Schedule, target: Target, index: PackIndex) -> tuple[Layout, Staging | None, PlanTables]:
    """The kernel's own memory, where its workers put what they receive, and the plan they follow."""
    layout = make_layout(program, schedule.workers, schedule.tile_rows, tagged=target.near_floats is not None)
    staging = None
    if target.near_floats is not None:
        staging = make_staging(program, schedule, target)
        layout = with_far_memory(layout, schedule.workers, staging.far_floats)
    return layout, staging, make_tables(program, schedule, layout, index, staging)


def _source(program: Program, schedule: Schedule, target: Target, layout: Layout, tables: PlanTables, index: PackIndex, staging: Staging | None) -> str:
    environment = _environment()
    buffers, functions = Scope(), Scope()
    for placed in layout.buffers:
        buffers.name(placed.buffer.name, f"buffer_{placed.buffer.name}")
    value_ops = _macros("ops_values.j2")
    contexts = joined([
        stage_context(
            program, program.segments[segment], stage, number, tables.first_instance[number], layout, schedule.tile_rows,
            buffers, functions, value_ops, staging,
        )
        for number, segment, stage in numbered_stages(program)
    ])  # fmt: skip
    chains = _chains(contexts)
    _check_ops(contexts)
    text = environment.get_template("kernel.j2").render(
        program=program,
        target=target,
        machine=target.machine_for(program.ranks),
        workers=schedule.workers,
        tile_rows=schedule.tile_rows,
        launch=_launch(program.ranks, target.samples),
        sizes=_sizes(program, layout, index, contexts, staging),
        buffers=[(buffers.name(placed.buffer.name), placed) for placed in layout.buffers],
        plan=tables,
        used=_used(contexts),
        samples=target.samples,
        stages=contexts,
        chains={chain.stages[-1].number: chain for chain in chains if len(chain.stages) > 1},
        segments=_segments(program, chains),
    )
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


@cache
def _environment() -> jinja2.Environment:
    folder = Path(kogc.templates.__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=False, autoescape=False,
    )  # fmt: skip
    environment.filters["literal"] = float_literal
    return environment


@cache
def _macros(template: str) -> frozenset[str]:
    module = _environment().get_template(template).module
    return frozenset(name for name in vars(module) if not name.startswith("_"))


def _check_ops(contexts: list[StageContext]) -> None:
    """Every op must have a macro in the role it plays."""
    for stage in contexts:
        for op in (*stage.prologue_once, *stage.prologue_own):
            if not op.is_value and op.op not in _macros("ops_prologue.j2"):
                raise RenderError(f"stage {stage.name}: op {op.op} has no prologue code (templates/ops_prologue.j2)")
        for op in (op for part in stage.parts for op in part.ops):
            if not op.is_value and op.op not in _macros("ops_epilogue.j2"):
                raise RenderError(f"stage {stage.name}: op {op.op} has no epilogue code (templates/ops_epilogue.j2)")


def _launch(ranks: int, samples: bool) -> Mapping[str, Any]:
    reasons = [(f"FINISH_{name.upper()}", number) for number, name in FINISH_REASONS.items()]
    faults = [(f"FAULT_{name.upper()}", number) for name, number in (FAULTS | RANK_FAULTS if ranks > 1 else FAULTS).items()]
    modes = [("MODE_GENERATE", MODE_GENERATE), ("MODE_TEACHER_FORCED", MODE_TEACHER_FORCED), *([("MODE_SAMPLE", MODE_SAMPLE)] if samples else [])]
    return {
        "state": c_struct("kogc_state", STATE_FIELDS),
        "sampling": c_struct("kogc_sampling", SAMPLING_FIELDS),
        "launch": c_struct("kogc_launch", launch_fields(ranks, samples)),
        "version": LAUNCH_VERSION,
        "constants": [*modes, *reasons, *faults],
        "in_prompt": IN_PROMPT,
    }


def _sizes(
    program: Program, layout: Layout, index: PackIndex, contexts: list[StageContext], staging: Staging | None
) -> Mapping[str, Any]:
    lengths = [length for _, length in index.streams]
    steps = []
    for number, segment in enumerate(program.segments):
        kinds = ", ".join(stage.name for stage in segment.stages)
        steps.append(f"{segment.name}: {kinds}" if segment.count == 1 else f"{segment.count} × {segment.name}: {kinds}")
    return {
        "max_columns": layout.columns,
        "exchange_bytes": layout.exchange_bytes,
        "kv_bytes": layout.kv_bytes,
        "probe_floats": layout.probe_floats,
        "scratch_floats": staging.near_floats if staging else layout.scratch_floats,
        "far_floats": staging.far_floats if staging else None,
        "far_begin": layout.far_begin,
        "reports_begin": layout.reports_begin,
        "logit_slots": _logit_slots(program),
        "stream_summary": f"{min(lengths)} to {max(lengths)} bytes a step, {sum(lengths)} in all",
        "step_summary": steps,
    }


def _logit_slots(program: Program) -> int:
    """Slots of the best logits. Kept logits go by the number of the step, so there must be one write of them in each."""
    best = [buffer for buffer in program.buffers if buffer.payload == "best"]
    if any(buffer.writes_per_step != 1 for buffer in best):
        raise RenderError(f"{program.model} publishes its best logits more than once a step, which the sampler does not expect")
    return best[0].slots if best else 1


def _used(contexts: list[StageContext]) -> Mapping[str, Any]:
    prologue = [op for stage in contexts for op in (*stage.prologue_once, *stage.prologue_own)]
    epilogue = [op for stage in contexts for part in stage.parts for op in part.ops]
    functions = {op.attrs["fn"] for op in prologue if "fn" in op.attrs}
    functions |= {tile.attrs["fn"] for op in epilogue for tile in op.tiles if "fn" in tile.attrs}
    return {
        "ops": {op.op for op in (*prologue, *epilogue)},
        "activations": functions,
        "kinds": {stage.kind for stage in contexts},
    }


@dataclass(frozen=True)
class Chain:
    """Stages that are one function: of each but the last, the next one's weights are taken in it. Most have one."""

    stages: tuple[StageContext, ...]

    @property
    def function(self) -> str:
        first, last = self.stages[0], self.stages[-1]
        return first.function if first is last else f"stages_{first.number}_to_{last.number}"


def _chains(contexts: list[StageContext]) -> list[Chain]:
    chains: list[Chain] = []
    for stage in contexts:
        if stage.ahead:
            chains[-1] = Chain((*chains[-1].stages, stage))
        else:
            chains.append(Chain((stage,)))
    return chains


def _segments(program: Program, chains: list[Chain]) -> list[Mapping[str, Any]]:
    """The functions that a step calls."""
    found, turn = [], iter(chains)
    for segment in program.segments:
        functions, left = [], len(segment.stages)
        while left:
            chain = next(turn)
            functions.append(chain.function)
            left -= len(chain.stages)
        found.append({"name": segment.name, "count": segment.count, "functions": functions})
    return found
