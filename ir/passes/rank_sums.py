"""Sums over lanes that every rank makes for itself.

A stage that only brings lanes together (``separate_rows``), for readers that belong to no lane, would have its rows dealt over all
ranks: the lanes' vectors would cross to whoever adds them, and the sums would cross again to all who read them. Here every
rank makes all rows of the sum from what is sent to it anyway, and its workers read their own rank's: one exchange less.
"""

from __future__ import annotations

from dataclasses import replace

from kogc.ir.program import Operand, Program, Stage


def sums_in_every_rank(program: Program) -> Program:
    """``program`` with a lane per rank in the stages of kind ``rows`` that have none, and in the buffers they alone write and that
    are only read whole."""
    if program.ranks == 1:
        return program
    buffers = _buffers(program)
    segments = (replace(segment, stages=tuple(_stage(stage, buffers, program.ranks) for stage in segment.stages)) for segment in program.segments)
    widened = (replace(b, lanes=program.ranks) if b.name in buffers else b for b in program.buffers)
    return replace(program, buffers=tuple(widened), segments=tuple(segments))


def _buffers(program: Program) -> set[str]:
    stages = [stage for segment in program.segments for stage in segment.stages]
    found = {output.buffer for stage in stages if _brings_together(stage) for output in stage.parts[0].outputs}
    others = {output.buffer for stage in stages if not _brings_together(stage) for part in stage.parts for output in part.outputs}
    others |= {output.buffer for stage in stages for output in stage.prologue_outputs}
    others |= {operand.buffer for stage in stages for operand in stage.operands if operand.access != "lane" or _brings_together(stage)}
    return found - others


def _brings_together(stage: Stage) -> bool:
    return stage.kind == "rows" and stage.lanes == 1 and all(operand.access == "rows_all_lanes" for operand in stage.operands)


def _stage(stage: Stage, buffers: set[str], ranks: int) -> Stage:
    if _brings_together(stage) and {output.buffer for output in stage.parts[0].outputs} <= buffers:
        return replace(stage, lanes=ranks)
    return replace(stage, operands=tuple(_read(operand, buffers, ranks) for operand in stage.operands))


def _read(operand: Operand, buffers: set[str], ranks: int) -> Operand:
    return replace(operand, access="rank", lanes=ranks) if operand.buffer in buffers else operand

