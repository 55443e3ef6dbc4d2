"""The plan: schedule and per-iteration facts as one blob of int32 words, read by the kernel's ``Cursor``.

Instances are numbered through the program: all iterations of stage 0, then of stage 1 … in source order, so that an
instance is ``first_instance(stage) + iteration``. The blob holds

* word 0 (``PLAN_STREAMS``): where the streams are listed: per worker byte offset and length, two words each;
* from ``shared``, one word per instance: where its facts for all workers begin: one word per Const (fp32 values from the
  consts' begin); two words per cache, appended ones in output order or the attention's keys and values (bytes from the
  KV's begin); one word per write that other ranks read in some iteration: which do (bit r for rank r); two words for an
  embedding table (bytes from the tables' begin); one word for an attention's window;
* from ``work``, one word per instance and worker: where that worker's share begins: per Operand the intervals of workers
  to await (where words carry their own flags, and but for a vector that every warp takes in by itself: the lane and row its
  space begins with, and the intervals it needs as lane, first, last); the number of visits (not for ``sample``); the shares of values every worker computes (output, lane, first,
  last), if the stage has such; the visits. A visit is: lane; the shares of that lane's values (output, first, last), if the stage has such; runs (part,
  first unit, units).

Machines whose words carry their own flags have three words in front: ``PLAN_STREAMS`` as above; ``PLAN_FEEDS``, where the
workers' feeds are listed, one word each; ``PLAN_SCRIPTS``, where their scripts are listed, begin and length each. A feed: how
many attention units the worker does in a step, and for each the bytes of weights that come before (two words), the begins
of the head's keys and values in the KV (two words each), split, splits, window, bytes of a cache row. A script: the two
indices above and their records for this worker alone, counted from its begin, so that a worker can keep it near; where
constants are kept near, too, and lanes have their own, a record begins with the worker's lane.

Lists are preceded by their length. 64-bit values are two words, low first. Equal records are stored once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kogc.codegen.layout import Layout, computed_once, numbered_stages, stage_outputs, stage_places
from kogc.codegen.pack_index import PackIndex
from kogc.codegen.staging import Receipt, Staging
from kogc.ir.program import Affine, Program, Run, Schedule, Share, Stage, WorkerStage
from kogc.ir.types import NUMPY_DTYPES


@dataclass(frozen=True)
class PlanTables:
    """The plan's bytes and the words from which the two indices lie; ``first_instance`` per global stage number.
    ``script_words``: of the longest script, None where workers have none."""

    data: bytes
    shared: int
    work: int
    first_instance: tuple[int, ...]
    script_words: int | None

    @property
    def words(self) -> int:
        return len(self.data) // 4


def first_instances(program: Program) -> tuple[int, ...]:
    """The number of the first instance of every stage, by global stage number."""
    counts = [program.segments[segment].count for _, segment, _ in numbered_stages(program)]
    return tuple(np.r_[0, np.cumsum(counts)].tolist()[:-1])


def make_tables(
    program: Program, schedule: Schedule, layout: Layout, index: PackIndex, staging: Staging | None = None
) -> PlanTables:
    """Flatten ``schedule``. ``index`` tells where streams, tables and constants lie in the pack; with ``staging`` operands
    are received word by word."""
    instances = sum(segment.count * len(segment.stages) for segment in program.segments)
    shared, work = (0, instances) if staging else (1, 1 + instances)
    records = list(_records(program, schedule, layout, index, staging))
    streams = [word for stream in index.streams for value in stream for word in _wide(value)]
    if staging is None:
        blob = _Blob(work + instances * schedule.workers)
        blob.words[0] = blob.record(streams)
        for at, (facts, works) in enumerate(records):
            blob.words[shared + at] = blob.record(facts)
            for worker, words in enumerate(works):
                blob.words[work + at * schedule.workers + worker] = blob.record(words)
        return PlanTables(np.array(blob.words, np.int32).tobytes(), shared, work, first_instances(program), None)
    blob = _Blob(3)
    blob.words[0] = blob.record(streams)
    blob.words[1] = blob.record([blob.record(feed) for feed in _feeds(program, schedule, layout, index)])
    scripts = [_script(records, worker) for worker in range(schedule.workers)]
    blob.words[2] = blob.record([word for script in scripts for word in (blob.record(script), len(script))])
    return PlanTables(np.array(blob.words, np.int32).tobytes(), shared, work, first_instances(program), max(map(len, scripts)))


def _records(program: Program, schedule: Schedule, layout: Layout, index: PackIndex, staging: Staging | None):
    """For every instance, in the order of their numbers: facts for all workers, and every worker's own words."""
    for (global_number, _, stage), (segment, place) in zip(numbered_stages(program), stage_places(program), strict=True):
        for iteration, dealt in enumerate(schedule.work[segment][place]):
            if staging is None:
                works = [_awaited(work) + _work(stage, work) for work in dealt]
            else:
                intake = staging.intakes[global_number]
                polled = intake.operand if intake else None
                received = [r for r, operand in zip(staging.receipts[global_number, iteration], stage.operands, strict=True) if operand is not polled]
                named = any(const.lanes > 1 and const.name in staging.consts[global_number] for const in stage.consts)
                lanes = [[_first_lane(work)] if named else [] for work in dealt]
                works = [lanes[w] + _received(received, w) + _work(stage, work) for w, work in enumerate(dealt)]
            yield _shared_facts(program, stage, iteration, layout, index), works


def _first_lane(work: WorkerStage) -> int:
    return work.runs[0].lane if work.runs else 0


def _script(records: list[tuple[list[int], list[list[int]]]], worker: int) -> list[int]:
    """All that one worker reads of the plan in a step, small enough to be kept near it."""
    blob = _Blob(2 * len(records))
    for at, (facts, works) in enumerate(records):
        blob.words[at], blob.words[len(records) + at] = blob.record(facts), blob.record(works[worker])
    return blob.words


def _feeds(program: Program, schedule: Schedule, layout: Layout, index: PackIndex) -> list[list[int]]:
    """Per worker: how many attention units it does in a step, and for each where in its stream the caches come in between."""
    size = NUMPY_DTYPES[program.dtype].itemsize
    done = [0] * schedule.workers
    feeds: list[list[int]] = [[0] for _ in done]
    for segment, iteration, number, stage in program.instances():
        unit_bytes = index.unit_bytes[segment][number]
        core = stage.attention
        for worker, work in enumerate(schedule.work[segment][number][iteration]):
            done[worker] += sum(run.count * unit_bytes[run.part] for run in work.runs if any(unit_bytes))
            for run in work.runs if core else ():
                keys, values = (layout.caches[key] for key in stage_caches(stage, iteration))
                row = layout.cache_pitch(program.dtype, core.head_dim) * size
                for unit in range(run.first, run.first + run.count):
                    head, split = divmod(unit, core.splits)
                    own_lane = run.lane % (stage.lanes // program.ranks)
                    begin = (own_lane * core.kv_heads + head) * program.capacity * row
                    places = [word for value in (done[worker], keys + begin, values + begin) for word in _wide(value)]
                    feeds[worker] += [*places, split, core.splits, _per_iteration(core.windows, iteration) or 0, row]
                    feeds[worker][0] += 1
    return feeds


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


def _shared_facts(program: Program, stage: Stage, iteration: int, layout: Layout, index: PackIndex) -> list[int]:
    words = [index.consts[const.key(iteration)] for const in stage.consts]
    for key in stage_caches(stage, iteration):
        words += _wide(layout.caches[key])
    words += sent_writes(stage, iteration).values()
    if stage.embed_table:
        words += _wide(index.embeds[stage.embed_table] * NUMPY_DTYPES[program.dtype].itemsize)
    if stage.attention:
        words.append(_per_iteration(stage.attention.windows, iteration) or 0)
    return words


def sent_writes(stage: Stage, iteration: int) -> dict[tuple[str, Affine], int]:
    """The writes that leave their rank in some iteration, in the order of the stage's writes, and where they go in this one."""
    found: dict[tuple[str, Affine], int] = {}
    for output in (output for output, _ in stage_outputs(stage) if output.sent_to):
        key = (output.buffer, output.write)
        found[key] = found.get(key, 0) | output.sent_to[iteration]
    return found


def stage_caches(stage: Stage, iteration: int) -> tuple[str, ...]:
    """Keys of the caches a stage instance touches: those it appends to, in output order, or the attention's two."""
    if stage.attention:
        return _per_iteration(stage.attention.caches, iteration)
    appends = [output for part in stage.parts for output in part.outputs if output.kind == "cache"]
    return tuple(_per_iteration(output.caches, iteration) for output in appends)


def _per_iteration(values: Sequence, iteration: int):
    return values[iteration if len(values) > 1 else 0]


def shares_once(stage: Stage) -> list[int]:
    """Numbers of the prologue outputs that are computed once for the stage."""
    ops = {op.name: op for op in stage.prologue}
    return [number for number, output in enumerate(stage.prologue_outputs) if computed_once(ops[output.value])]


def shares_own(stage: Stage) -> list[int]:
    """Numbers of the prologue outputs that are computed lane by lane."""
    once = shares_once(stage)
    return [number for number in range(len(stage.prologue_outputs)) if number not in once]


def _awaited(work: WorkerStage) -> list[int]:
    return [word for intervals in work.awaits for word in _intervals(intervals)]


def _received(receipts: list[list[Receipt]], worker: int) -> list[int]:
    words: list[int] = []
    for receipt in (of_operand[worker] for of_operand in receipts):
        words += [receipt.lane, receipt.row, len(receipt.intervals), *(value for interval in receipt.intervals for value in interval)]
    return words


def _work(stage: Stage, work: WorkerStage) -> list[int]:
    words: list[int] = []
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
