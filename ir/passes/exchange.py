"""The sync plan: what every worker awaits, reads and publishes in one step, as data.

It is derived from the program (what is read, by data flow) and the schedule (who makes what, who waits for whom), so a
wait that is missing from the schedule shows as a read that nothing covers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import or_

import numpy as np

from kogc.ir.passes.elements import Deal, Made, late_outputs, made_by, needed_of, prologue_operands
from kogc.ir.passes.spans import PlanError, Spans
from kogc.ir.program import Buffer, Operand, Program, Schedule, Stage, WorkerStage


@dataclass(frozen=True)
class Wait:
    """Every worker's wait for one operand: bool ``producers[reader, producer]``. ``early``: before the prologue."""

    buffer: str
    write: int
    early: bool
    producers: np.ndarray


@dataclass(frozen=True)
class Read:
    """What every worker reads of one write. ``early``: before the units; else between them, up to the end of the stage."""

    buffer: str
    write: int
    early: bool
    spans: Spans


@dataclass(frozen=True)
class Publish:
    """What every worker publishes of one write. ``early``: once the prologue's outputs are stored; else when the stage is
    done: all its reads and stores come before the first of these. ``sent_to``: the ranks that get it besides the worker's own,
    as a mask."""

    buffer: str
    write: int
    early: bool
    spans: Spans
    sent_to: int = 0


@dataclass(frozen=True)
class Instance:
    """One stage instance of the step. ``head``: left out in steps whose logits nobody needs."""

    name: str
    iteration: int
    head: bool
    waits: tuple[Wait, ...]
    reads: tuple[Read, ...]
    publishes: tuple[Publish, ...]

    def __str__(self) -> str:
        return f"stage {self.name}, iteration {self.iteration}"


@dataclass(frozen=True)
class Event:
    """One entry of a worker's list. ``kind`` await: ``intervals`` of workers; read, publish: of elements, lane · width + e."""

    kind: str
    instance: str
    buffer: str
    write: int
    intervals: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SyncPlan:
    """The events of one step, stage instance by stage instance, for all workers of all ``ranks``."""

    workers: int
    buffers: dict[str, Buffer]
    instances: tuple[Instance, ...]
    ranks: int = 1

    def rank_of(self) -> np.ndarray:
        """The rank of every worker: int [workers]."""
        return np.arange(self.workers) * self.ranks // self.workers

    def unsent(self, publish: Publish, wanted: np.ndarray) -> np.ndarray:
        """Which of the pairs ``wanted`` (bool [reader, maker]) of a write do not meet in one memory: two ranks, and the value
        is not sent to the reader's."""
        ranks = self.rank_of()
        got = (publish.sent_to >> ranks & 1).astype(bool)
        return wanted & ~got[:, None] & (ranks[:, None] != ranks[None])

    def events(self, worker: int) -> list[Event]:
        """What ``worker`` does in one step, in order. Prologue waits, reads and publishes come before the epilogue's."""
        found = []
        for instance in self.instances:
            for early in (True, False):
                for kind, group in (("await", instance.waits), ("read", instance.reads), ("publish", instance.publishes)):
                    chosen = (one for one in group if one.early == early)
                    events = (Event(kind, str(instance), one.buffer, one.write, _intervals(one, worker)) for one in chosen)
                    found += [event for event in events if event.intervals]
        return found


def _intervals(one: Wait | Read | Publish, worker: int) -> tuple[tuple[int, int], ...]:
    if not isinstance(one, Wait):
        return one.spans.of_worker(worker)
    edges = np.flatnonzero(np.diff(np.pad(one.producers[worker], 1).astype(np.int8)))
    return tuple((int(low), int(high)) for low, high in edges.reshape(-1, 2))


def is_head(stage: Stage) -> bool:
    """Whether the stage is left out in a step of prompt tokens whose logits nobody needs."""
    return stage.kind == "sample" or any(output.kind == "logits" for part in stage.parts for output in part.outputs)


def sync_plan(program: Program, schedule: Schedule) -> SyncPlan:
    """Derive the sync plan. Raises PlanError for a read of something no earlier stage of the step makes."""
    made: dict[tuple[str, int], Spans] = {}
    appended: dict[str, tuple[str, int]] = {}
    instances = []
    for segment, iteration, number, stage in program.instances():
        work = schedule.work[segment][number][iteration]
        deal = Deal.from_work(work)
        early = prologue_operands(stage)
        shares = [(worker, share) for worker, one in enumerate(work) for share in one.shares]
        writes = made_by(program, stage, iteration, deal, shares, schedule.workers, schedule.tile_rows)
        instances.append(
            Instance(
                stage.name,
                iteration,
                is_head(stage),
                tuple(_wait(operand, iteration, i, i in early, work) for i, operand in enumerate(stage.operands)),
                tuple(_reads(program, schedule, stage, iteration, deal, early, made, appended)),
                tuple(Publish(one.buffer, one.write, one.early, one.spans, _sent_to(stage, iteration, one)) for one in writes),
            )
        )
        made.update({(one.buffer, one.write): one.spans for one in writes})
        appended.update(_appends(stage, iteration))
    return SyncPlan(schedule.workers, {buffer.name: buffer for buffer in program.buffers}, tuple(instances), program.ranks)


def _sent_to(stage: Stage, iteration: int, made: Made) -> int:
    """To which ranks some output of the stage sends this write."""
    outputs = (*stage.prologue_outputs, *(output for _, output in late_outputs(stage)))
    masks = (o.sent_to[iteration] for o in outputs if o.sent_to and (o.buffer, o.write.at(iteration)) == (made.buffer, made.write))
    return reduce(or_, masks, 0)


def _wait(operand: Operand, iteration: int, number: int, early: bool, work: tuple[WorkerStage, ...]) -> Wait:
    producers = np.zeros((len(work), len(work)), bool)
    for reader, one in enumerate(work):
        for low, high in one.awaits[number]:
            producers[reader, low:high] = True
    return Wait(operand.buffer, operand.write.at(iteration), early, producers)


def _reads(program, schedule, stage: Stage, iteration: int, deal: Deal, early: set[int], made, appended) -> list[Read]:
    """Reads by data flow: of operands, and of the caches an attention core names, whatever its operands say."""
    wanted = [(o, o.write.at(iteration), i in early) for i, o in enumerate(stage.operands) if o.access != "cache"]
    for key in _cache_keys(stage, iteration):
        if key not in appended:
            raise PlanError(
                f"stage {stage.name}, iteration {iteration} reads cache {key} before any stage of the step appends to it"
            )
        buffer, write = appended[key]
        order = program.buffer(buffer)
        wanted.append((Operand(key, buffer, stage.attention.output.write, "cache", order.lanes, order.width), write, True))
    reads = []
    for operand, write, is_early in wanted:
        if (operand.buffer, write) not in made:
            raise PlanError(
                f"stage {stage.name}, iteration {iteration} reads write {write} of buffer {operand.buffer}, which no earlier "
                "stage of the step makes: correct the operand's write number or the order of the stages"
            )
        owned = made[operand.buffer, write]
        spans = needed_of(program, stage, operand, deal, owned, schedule.workers, schedule.tile_rows)
        reads.append(Read(operand.buffer, write, is_early, spans))
    return reads


def _cache_keys(stage: Stage, iteration: int) -> tuple[str, ...]:
    if not stage.attention:
        return ()
    caches = stage.attention.caches
    return caches[iteration if len(caches) > 1 else 0]


def _appends(stage: Stage, iteration: int) -> dict[str, tuple[str, int]]:
    """Which (buffer, write) orders the append to each cache."""
    outputs = [output for part in stage.parts for output in part.outputs if output.kind == "cache"]
    return {o.caches[iteration if len(o.caches) > 1 else 0]: (o.buffer, o.write.at(iteration)) for o in outputs}
