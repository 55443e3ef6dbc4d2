"""The plan: schedule and per-iteration facts as one blob of int32 words, read by the kernel's ``Cursor``.

Instances are numbered through the program: all iterations of stage 0, then of stage 1 … in source order, so that an
instance is ``first_instance(stage) + iteration``. The blob holds

* word 0 (``PLAN_STREAMS``): where the streams are listed: per worker byte offset and length, two words each;
* from ``shared``, one word per instance: where its facts for all workers begin: one word per Const (fp32 values from the
  consts' begin); two words per cache, appended ones in output order or the attention's keys and values (bytes from the
  KV's begin); two words for an embedding table (bytes from the tables' begin); one word for an attention's window; for
  ``sample`` the intervals of workers that make logits;
* from ``work``, one word per instance and worker: where that worker's share begins: per Operand the intervals of workers
  to await; the number of visits (not for ``sample``); the shares of values every worker computes (output, lane, first,
  last), if the stage has such; the visits. A visit is: lane; the shares of that lane's values (output, first, last), if the stage has such; runs (part,
  first unit, units).

Lists are preceded by their length. 64-bit values are two words, low first. Equal records are stored once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kogc.codegen.layout import Layout, computed_once, numbered_stages
from kogc.codegen.pack_index import PackIndex
from kogc.ir.program import Program, Run, Schedule, Share, Stage, WorkerStage
from kogc.ir.types import NUMPY_DTYPES


@dataclass(frozen=True)
class PlanTables:
    """The plan's bytes and the words from which the two indices lie; ``first_instance`` per global stage number."""

    data: bytes
    shared: int
    work: int
    first_instance: tuple[int, ...]

    @property
    def words(self) -> int:
        return len(self.data) // 4


def first_instances(program: Program) -> tuple[int, ...]:
    """The number of the first instance of every stage, by global stage number."""
    counts = [program.segments[segment].count for _, segment, _ in numbered_stages(program)]
    return tuple(np.r_[0, np.cumsum(counts)].tolist()[:-1])


def make_tables(program: Program, schedule: Schedule, layout: Layout, index: PackIndex) -> PlanTables:
    """Flatten ``schedule``. ``index`` tells where streams, tables and constants lie in the pack."""
    instances = sum(segment.count * len(segment.stages) for segment in program.segments)
    blob = _Blob(1 + instances * (1 + schedule.workers))
    shared, work = 1, 1 + instances
    makers = _logits_makers(program, schedule)
    at = 0
    for _, segment, stage in numbered_stages(program):
        number = program.segments[segment].stages.index(stage)
        for iteration in range(program.segments[segment].count):
            facts = _shared_facts(program, stage, iteration, layout, index, makers)
            blob.words[shared + at] = blob.record(facts)
            for worker in range(schedule.workers):
                record = _work(stage, schedule.at(segment, number, iteration, worker))
                blob.words[work + at * schedule.workers + worker] = blob.record(record)
            at += 1
    blob.words[0] = blob.record([word for stream in index.streams for value in stream for word in _wide(value)])
    return PlanTables(np.array(blob.words, np.int32).tobytes(), shared, work, first_instances(program))


class _Blob:
    def __init__(self, index_words: int) -> None:
        self.words = [0] * index_words
        self._known: dict[tuple[int, ...], int] = {}

    def record(self, words: Sequence[int]) -> int:
        """Where ``words`` lie, appended unless they are there already."""
        key = tuple(words)
        if key not in self._known:
            self._known[key] = len(self.words)
            self.words += key
        return self._known[key]


def _wide(value: int) -> tuple[int, int]:
    low, high = value & 0xFFFFFFFF, value >> 32
    return low - (1 << 32) if low >= 1 << 31 else low, high


def _intervals(intervals: Sequence[tuple[int, int]]) -> list[int]:
    return [len(intervals), *(bound for interval in intervals for bound in interval)]


def _shared_facts(program: Program, stage: Stage, iteration: int, layout: Layout, index: PackIndex, makers) -> list[int]:
    words = [index.consts[const.key(iteration)] for const in stage.consts]
    for key in stage_caches(stage, iteration):
        words += _wide(layout.caches[key])
    if stage.embed_table:
        words += _wide(index.embeds[stage.embed_table] * NUMPY_DTYPES[program.dtype].itemsize)
    if stage.attention:
        words.append(_per_iteration(stage.attention.windows, iteration) or 0)
    if stage.kind == "sample":
        words += _intervals(makers)
    return words


def stage_caches(stage: Stage, iteration: int) -> tuple[str, ...]:
    """Keys of the caches a stage instance touches: those it appends to, in output order, or the attention's two."""
    if stage.attention:
        return _per_iteration(stage.attention.caches, iteration)
    appends = [output for part in stage.parts for output in part.outputs if output.kind == "cache"]
    return tuple(_per_iteration(output.caches, iteration) for output in appends)


def _per_iteration(values: Sequence, iteration: int):
    return values[iteration if len(values) > 1 else 0]


def _logits_makers(program: Program, schedule: Schedule) -> tuple[tuple[int, int], ...]:
    """Intervals of workers that own rows of the vocabulary head."""
    owners: set[int] = set()
    for _, segment, stage in numbered_stages(program):
        heads = {i for i, part in enumerate(stage.parts) if any(output.kind == "logits" for output in part.outputs)}
        if heads:
            works = schedule.work[segment][program.segments[segment].stages.index(stage)][0]
            owners |= {worker for worker, work in enumerate(works) if any(run.part in heads for run in work.runs)}
    starts = [worker for worker in sorted(owners) if worker - 1 not in owners]
    ends = [worker + 1 for worker in sorted(owners) if worker + 1 not in owners]
    return tuple(zip(starts, ends, strict=True))


def shares_once(stage: Stage) -> list[int]:
    """Numbers of the prologue outputs that are computed once for the stage."""
    ops = {op.name: op for op in stage.prologue}
    return [number for number, output in enumerate(stage.prologue_outputs) if computed_once(ops[output.value])]


def shares_own(stage: Stage) -> list[int]:
    """Numbers of the prologue outputs that are computed lane by lane."""
    once = shares_once(stage)
    return [number for number in range(len(stage.prologue_outputs)) if number not in once]


def _work(stage: Stage, work: WorkerStage) -> list[int]:
    words = [word for intervals in work.awaits for word in _intervals(intervals)]
    if stage.kind == "sample":
        return words
    once, own = shares_once(stage), shares_own(stage)
    visits = _visits(work.runs, [share for share in work.shares if share.output in own])
    words.append(len(visits))
    if once:
        mine = [share for share in work.shares if share.output in once]
        words += [len(mine), *(v for s in mine for v in (s.output, s.lane, s.first, s.last))]
    for lane, shares, runs in visits:
        words.append(lane)
        if own:
            words += [len(shares), *(v for s in shares for v in (s.output, s.first, s.last))]
        words += [len(runs), *(v for run in runs for v in (run.part, run.first, run.count))]
    return words


def _visits(runs: Iterable[Run], shares: Sequence[Share]) -> list[tuple[int, list[Share], list[Run]]]:
    """Runs grouped by lane in their order, each lane's shares at its first visit; lanes with shares only come last."""
    visits: list[tuple[int, list[Share], list[Run]]] = []
    left = list(shares)
    for run in runs:
        if not visits or visits[-1][0] != run.lane:
            visits.append((run.lane, [share for share in left if share.lane == run.lane], []))
            left = [share for share in left if share.lane != run.lane]
        visits[-1][2].append(run)
    for lane in dict.fromkeys(share.lane for share in left):
        visits.append((lane, [share for share in left if share.lane == lane], []))
    return visits
