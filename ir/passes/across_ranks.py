"""Across ranks: which writes leave the memory of the rank that makes them, and for which ranks.

Ranks share no memory. A value that a worker of another rank reads is put into that rank's own copy of the exchange buffer
by its maker, once, when it is made; nobody ever reads another rank's memory. What a write needs follows from who reads it:
here the schedule's waits become the ``sent_to`` of outputs and the scope ``ranks`` of buffers. Whether a value is late or has
layers of time to arrive makes no difference to this: a delayed sum is a read of an earlier write.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kogc.ir.passes.exchange import SyncPlan, sync_plan
from kogc.ir.passes.spans import PlanError, needs
from kogc.ir.program import Buffer, Output, Part, Program, Schedule, Segment, Stage

#: (buffer, in-step write number) → mask of the ranks that read it, other than its makers' own.
Sent = dict[tuple[str, int], int]

#: Masks of ranks are words of the plan.
MOST_RANKS = 16


def across_ranks(program: Program, schedule: Schedule, tagged: bool = False) -> Program:
    """``program`` with ``sent_to`` of its outputs and ``scope`` of its buffers set for its ``ranks``.

    ``tagged``: words carry their own flags, which tell a few writes of a slot apart, so that whoever gets one write of a buffer
    must get them all: an older word could be taken for the one awaited.

    Raises PlanError when the workers do not divide over the ranks, or a cache would have to be read across ranks: caches are
    never sent.
    """
    if program.ranks == 1:
        return program
    if program.ranks > MOST_RANKS or schedule.workers % program.ranks:
        raise PlanError(f"{schedule.workers} workers do not divide over {program.ranks} ranks (at most {MOST_RANKS})")
    plan = sync_plan(program, schedule)
    sent = _every_write(plan, _sent(plan)) if tagged else _sent(plan)
    return replace(
        program,
        buffers=tuple(_scoped(buffer, sent) for buffer in program.buffers),
        segments=tuple(_segment(segment, sent) for segment in program.segments),
    )


def _sent(plan: SyncPlan) -> Sent:
    ranks, found = plan.rank_of(), {}
    makers = {(p.buffer, p.write): p.spans for instance in plan.instances for p in instance.publishes}
    for instance in plan.instances:
        for read in instance.reads:
            pairs = needs(read.spans, makers[read.buffer, read.write], plan.workers) & (ranks[:, None] != ranks[None])
            reading = np.unique(ranks[pairs.any(1)]).tolist()
            if reading and plan.buffers[read.buffer].payload == "cache":
                raise PlanError(
                    f"{instance}: rank {reading[0]} reads a cache that another rank appends to ({read.buffer}): ranks need "
                    "whole lanes, so give the stage as many lanes as there are ranks, or a multiple"
                )
            for rank in reading:
                found[read.buffer, read.write] = found.get((read.buffer, read.write), 0) | 1 << rank
    return found


def _every_write(plan: SyncPlan, sent: Sent) -> Sent:
    """Every write of a buffer goes where any of them goes."""
    whole: dict[str, int] = {}
    for (buffer, _), mask in sent.items():
        whole[buffer] = whole.get(buffer, 0) | mask
    return {(p.buffer, p.write): whole[p.buffer] for instance in plan.instances for p in instance.publishes if p.buffer in whole}


def _scoped(buffer: Buffer, sent: Sent) -> Buffer:
    return replace(buffer, scope="ranks") if any(name == buffer.name for name, _ in sent) else buffer


def _segment(segment: Segment, sent: Sent) -> Segment:
    return replace(segment, stages=tuple(_stage(stage, segment.count, sent) for stage in segment.stages))


def _stage(stage: Stage, count: int, sent: Sent) -> Stage:
    def outputs(of: Stage | Part, field: str) -> tuple[Output, ...]:
        return tuple(_output(output, count, sent) for output in getattr(of, field))

    attention = stage.attention and replace(stage.attention, output=_output(stage.attention.output, count, sent))
    parts = tuple(replace(part, outputs=outputs(part, "outputs")) for part in stage.parts)
    return replace(stage, prologue_outputs=outputs(stage, "prologue_outputs"), parts=parts, attention=attention)


def _output(output: Output, count: int, sent: Sent) -> Output:
    masks = tuple(sent.get((output.buffer, output.write.at(iteration)), 0) for iteration in range(count))
    return replace(output, sent_to=masks if any(masks) else ())


def own_lookups(program: Program) -> Program:
    """``program`` whose embeddings are looked up lane by lane, so that no rank waits for another before its first layer: every
    rank holds the whole table, of which a token reads one row."""
    if program.ranks == 1:
        return program
    lanes = {buffer.name: buffer.lanes for buffer in program.buffers}

    def by_lanes(stage: Stage) -> Stage:
        made = {lanes[output.buffer] for part in stage.parts for output in part.outputs}
        return replace(stage, lanes=made.pop()) if stage.kind == "embed" and len(made) == 1 else stage

    segments = (replace(segment, stages=tuple(map(by_lanes, segment.stages))) for segment in program.segments)
    return replace(program, segments=tuple(segments))
