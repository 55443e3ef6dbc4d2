"""A stage of its own that brings the splits of attention together, where every worker would have to read too much for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kogc.ir.passes.fuse_names import Unique
from kogc.ir.program import Affine, Buffer, Combine, Operand, OpSpec, Output, Part, Program, Stage

#: What the part of a combine stage starts from, and here hands on as it is.
_ROW = "row"


def separate_combine(program: Program, most_words: int) -> Program:
    """The program in which no matvec stage combines partials wider than ``most_words`` words per lane.

    Where one does in its prologue, a ``combine`` stage comes before it: its rows are dealt to workers, each of which reads
    only the records of its own rows' heads. It publishes the combined vector in a new buffer with the lanes and the write
    numbers of the partials, and the matvec stage reads that as it read the partials, under the name of the op it loses.
    What it published of the op's result the combine stage publishes.
    """
    combined = _combined_buffers(program, most_words)
    separation = _Separation(combined, _makers(program))
    segments = tuple(
        replace(segment, stages=tuple(one for stage in segment.stages for one in separation.of(stage)))
        for segment in program.segments
    )
    made = replace(program, buffers=_with_combined(program, combined), segments=segments)
    stages = {"stages": sum(1 for _ in made.instances())} if "stages" in program.meta else {}
    return replace(made, meta={**program.meta, **stages})


@dataclass(frozen=True)
class _Separation:
    """``combined``: partials buffer → buffer of the combined vectors. ``makers``: who makes each write of the partials."""

    combined: Mapping[str, Buffer]
    makers: Mapping[tuple[str, int], Stage]

    def of(self, stage: Stage) -> tuple[Stage, ...]:
        """The combine stages that ``stage`` needs before it, and what is left of it."""
        before = []
        for op, operand in _combines(stage):
            if operand.buffer in self.combined:
                before.append(self._combine(stage, op, operand))
                stage = _reading_combined(stage, op, operand, self.combined[operand.buffer])
        return (*before, stage)

    def _combine(self, stage: Stage, op: OpSpec, partials: Operand) -> Stage:
        attention = self.makers[partials.buffer, partials.write.at(0)]
        name = f"{attention.name.removesuffix('_attend')}_combine"
        published = [output for output in stage.prologue_outputs if output.value == op.name]
        outputs = (_output(self.combined[partials.buffer].name, partials.write), *(_output(o.buffer, o.write) for o in published))
        head_dim = op.attrs["head_dim"]
        return Stage(
            name, f"{attention.title}, splits combined", "combine", partials.lanes, (replace(partials, access="records"),),
            parts=(Part(op.name, "row", (), (), outputs),),
            combine=Combine(partials.name, op.width // head_dim, head_dim, op.attrs["splits"]),
        )  # fmt: skip


def _output(buffer: str, write: Affine) -> Output:
    return Output(_ROW, "buffer", buffer, write)


def _combines(stage: Stage) -> list[tuple[OpSpec, Operand]]:
    """The combining ops in a stage's prologue, with the partials they read."""
    operands = {operand.name: operand for operand in stage.operands}
    return [(op, operands[op.inputs[0]]) for op in stage.prologue if op.op == "attention_combine"]


def _reading_combined(stage: Stage, op: OpSpec, partials: Operand, combined: Buffer) -> Stage:
    """The stage without ``op``; the operand that replaces its result has its name. Epilogues read it by rows."""
    vector = Operand(op.name, combined.name, partials.write, partials.access, partials.lanes, combined.width)
    names = [one.name for one in (*stage.operands, *stage.consts, *stage.prologue)]
    names += [one.name for part in stage.parts for one in part.epilogue]
    rows = replace(vector, name=Unique(names)(f"{op.name}_rows"), access="rows")
    parts = tuple(replace(part, epilogue=_renamed(part.epilogue, op.name, rows.name)) for part in stage.parts)
    by_rows = (rows,) if parts != stage.parts else ()
    return replace(
        stage,
        operands=(*(vector if operand == partials else operand for operand in stage.operands), *by_rows),
        prologue=tuple(one for one in stage.prologue if one != op),
        prologue_outputs=tuple(output for output in stage.prologue_outputs if output.value != op.name),
        parts=parts,
    )


def _renamed(specs: tuple[OpSpec, ...], old: str, new: str) -> tuple[OpSpec, ...]:
    return tuple(replace(spec, inputs=tuple(new if name == old else name for name in spec.inputs)) for spec in specs)


# ── buffers ──


def _combined_buffers(program: Program, most_words: int) -> dict[str, Buffer]:
    """A buffer for every partials buffer that is too wide and that somebody combines."""
    name = Unique(buffer.name for buffer in program.buffers)
    found: dict[str, Buffer] = {}
    for _, _, _, stage in program.instances():
        for op, operand in _combines(stage):
            partials = program.buffer(operand.buffer)
            if partials.width > most_words and partials.name not in found:
                found[partials.name] = replace(partials, name=name(op.name), payload="vector", width=op.width)
    return found


def _with_combined(program: Program, combined: Mapping[str, Buffer]) -> tuple[Buffer, ...]:
    """All buffers, those of the combined vectors behind their partials, which now stay within their lane."""
    buffers: list[Buffer] = []
    for buffer in program.buffers:
        own = buffer.name in combined and buffer.lanes > 1
        buffers.append(replace(buffer, scope="group") if own else buffer)
        buffers += [combined[buffer.name]] if buffer.name in combined else []
    return tuple(buffers)


def _makers(program: Program) -> dict[tuple[str, int], Stage]:
    """The attention stage behind every write of a partials buffer."""
    attentions = ((iteration, stage) for _, iteration, _, stage in program.instances() if stage.attention)
    return {(stage.attention.output.buffer, stage.attention.output.write.at(iteration)): stage for iteration, stage in attentions}
