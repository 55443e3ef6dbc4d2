"""Into how many pieces of the context attention is split, so that its units deal evenly."""

from __future__ import annotations

from dataclasses import replace

from kogc.ir.program import Attention, Buffer, OpSpec, Program, Segment, Stage

#: More splits than this cost more in combining partials than an even deal saves.
MOST_SPLITS = 16


def choose_splits(program: Program, workers: int, most: int = MOST_SPLITS) -> int:
    """The smallest number of splits with which the (kv head, split) units of every attention stage deal evenly to
    ``workers``; where none up to ``most`` does, the smallest that keeps the workers busiest. 1 without attention."""
    heads = {stage.lanes * stage.attention.kv_heads for _, _, _, stage in program.instances() if stage.attention}
    return max(range(1, most + 1), key=lambda splits: (_busy(heads, splits, workers), -splits))


def _busy(heads: set[int], splits: int, workers: int) -> float:
    """Share of the workers' time spent on units, in the attention stage that deals worst."""
    return min((h * splits / (-(-h * splits // workers) * workers) for h in heads), default=1.0)


def with_splits(program: Program, splits: int) -> Program:
    """The program with every attention split ``splits`` times: partials buffers, their readers and combines follow."""
    cores = {stage.attention.output.buffer: stage.attention for _, _, _, stage in program.instances() if stage.attention}
    widths = {name: core.heads * splits * (core.head_dim + 2) for name, core in cores.items()}
    return replace(
        program,
        buffers=tuple(_buffer(buffer, widths) for buffer in program.buffers),
        segments=tuple(_segment(segment, splits, widths) for segment in program.segments),
    )


def _buffer(buffer: Buffer, widths: dict[str, int]) -> Buffer:
    return replace(buffer, width=widths[buffer.name]) if buffer.name in widths else buffer


def _segment(segment: Segment, splits: int, widths: dict[str, int]) -> Segment:
    return replace(segment, stages=tuple(_stage(stage, splits, widths) for stage in segment.stages))


def _stage(stage: Stage, splits: int, widths: dict[str, int]) -> Stage:
    attention: Attention | None = stage.attention and replace(stage.attention, splits=splits)
    operands = tuple(replace(o, width=widths[o.buffer]) if o.buffer in widths else o for o in stage.operands)
    partials = {o.name for o in operands if o.buffer in widths}
    prologue = tuple(_combine(op, splits) if partials & set(op.inputs) else op for op in stage.prologue)
    return replace(stage, attention=attention, operands=operands, prologue=prologue)


def _combine(op: OpSpec, splits: int) -> OpSpec:
    return replace(op, attrs={**op.attrs, "splits": splits}) if "splits" in op.attrs else op
