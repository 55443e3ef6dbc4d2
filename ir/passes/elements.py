"""Which elements of a buffer a stage makes and needs, given the units its workers were dealt."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from kogc.ir.ops.decode import rope_pairs
from kogc.ir.passes.spans import PlanError, Spans, expand
from kogc.ir.program import Buffer, Operand, Output, Part, Program, Share, Stage, WorkerStage


@dataclass(frozen=True)
class Deal:
    """The runs of all workers in one stage instance, as arrays: run i is worker[i]'s, in worker order."""

    worker: np.ndarray
    lane: np.ndarray
    part: np.ndarray
    first: np.ndarray
    count: np.ndarray

    @staticmethod
    def of(rows: list[tuple[int, int, int, int, int]]) -> Deal:
        """From (worker, lane, part, first, count) rows."""
        return Deal(*np.array(rows, np.int64).reshape(-1, 5).T)

    @staticmethod
    def from_work(work: tuple[WorkerStage, ...]) -> Deal:
        return Deal.of([(w, r.lane, r.part, r.first, r.count) for w, one in enumerate(work) for r in one.runs])

    def of_parts(self, parts: set[int]) -> Deal:
        chosen = np.isin(self.part, list(parts))
        return Deal(*(getattr(self, name)[chosen] for name in ("worker", "lane", "part", "first", "count")))

    def lanes(self) -> tuple[np.ndarray, np.ndarray]:
        """Unique (worker, lane) pairs."""
        pairs = np.unique(np.stack([self.worker, self.lane], 1), axis=0)
        return pairs[:, 0], pairs[:, 1]


@dataclass(frozen=True)
class Made:
    """One write of a buffer by one stage instance. ``early``: published after the prologue, before the units."""

    buffer: str
    write: int
    early: bool
    spans: Spans


# ── what is made ──


def made_by(
    program: Program, stage: Stage, iteration: int, deal: Deal, shares: list[tuple[int, Share]], workers: int, tile_rows: int
) -> list[Made]:
    """Every write the stage instance makes, with the spans of its makers sorted. ``shares`` are (worker, Share)."""
    made = [_shared(program, stage, iteration, shares, n) for n in range(len(stage.prologue_outputs))]
    late: dict[tuple[str, int], list[Spans]] = {}
    for part_index, output in late_outputs(stage):
        spans = _output_spans(program, stage, output, deal.of_parts({part_index}), part_index, workers, tile_rows)
        late.setdefault((output.buffer, output.write.at(iteration)), []).append(spans)
    return made + [Made(buffer, write, False, Spans.joined(parts).sorted()) for (buffer, write), parts in late.items()]


def late_outputs(stage: Stage) -> list[tuple[int, Output]]:
    """(part index, output) of what leaves the stage after its units."""
    if stage.attention:
        return [(0, stage.attention.output)]
    return [(i, output) for i, part in enumerate(stage.parts) for output in part.outputs]


def _shared(program: Program, stage: Stage, iteration: int, shares: list[tuple[int, Share]], number: int) -> Made:
    output = stage.prologue_outputs[number]
    width = program.buffer(output.buffer).width
    rows = [(w, s.lane * width + s.first, s.lane * width + s.last) for w, s in shares if s.output == number]
    spans = Spans.of(*np.array(rows, np.int64).reshape(-1, 3).T)
    return Made(output.buffer, output.write.at(iteration), True, spans.sorted())


def _output_spans(program: Program, stage: Stage, output: Output, deal: Deal, part_index: int, workers: int, tile_rows: int) -> Spans:
    buffer = program.buffer(output.buffer)
    if output.kind == "logits":
        # Whoever has no row says so, too: its word tells all others that it is done with the last token's.
        everybody = np.arange(workers)
        return Spans.of(everybody, everybody, everybody + 1)
    if stage.attention:
        return _partials(stage, deal, buffer)
    index, low, high = _rows(stage, part_index, deal, tile_rows)
    return _placed(deal.worker[index], deal.lane[index], low, high, buffer, every_lane=buffer.lanes > stage.lanes)


def _partials(stage: Stage, deal: Deal, buffer: Buffer) -> Spans:
    """A unit (kv head, split) makes one record per q head of its group."""
    core = stage.attention
    group = core.heads // core.kv_heads
    run, offset = expand(deal.count)
    head, split = np.divmod(deal.first[run] + offset, core.splits)
    record = ((head[:, None] * group + np.arange(group)) * core.splits + split[:, None]).reshape(-1)
    run, size = np.repeat(run, group), core.head_dim + 2
    return _placed(deal.worker[run], deal.lane[run], record * size, (record + 1) * size, buffer)


def _placed(worker, lane, low, high, buffer: Buffer, every_lane: bool = False) -> Spans:
    """Spans of a lane put at their place in the buffer; a buffer without lane axis has only lane 0."""
    if not every_lane:
        base = (lane if buffer.lanes > 1 else 0) * buffer.width
        return Spans.of(worker, base + low, base + high)
    base = (np.arange(buffer.lanes) * buffer.width)[:, None]
    return Spans.of(np.tile(worker, buffer.lanes), base + low, base + high)


# ── rows of units ──


def _rows(stage: Stage, part_index: int, deal: Deal, tile_rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(index of the run, low, high) intervals of the logical rows of every run, within its lane."""
    part = stage.parts[part_index]
    if part.unit == "rope":
        return _rope_rows(part, deal, tile_rows)
    low = deal.first * tile_rows
    return np.arange(len(low)), low, np.minimum(low + deal.count * tile_rows, stage.part_rows(part))


def _rope_rows(part: Part, deal: Deal, tile_rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    geometry = (part.rope["style"], part.rope["head_dim"], part.rope["rotary_dim"])
    first = deal.first * tile_rows
    last = np.minimum(first + deal.count * tile_rows, part.rows // 2)
    found = [_pair_intervals(*geometry, f, n) for f, n in zip(first.tolist(), last.tolist(), strict=True)]
    index, _ = expand(np.array([len(low) for low, _ in found], np.int64))
    joined = [np.concatenate([f[side] for f in found]) if found else np.empty(0, np.int64) for side in (0, 1)]
    return index, joined[0], joined[1]


@lru_cache(maxsize=4096)
def _pair_intervals(style: str, head_dim: int, rotary_dim: int, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """Intervals of the rows of pairs first … last, pairs counted through the heads."""
    head, pair = np.divmod(np.arange(first, last), head_dim // 2)
    rows = np.sort((head[:, None] * head_dim + rope_pairs(style, head_dim, rotary_dim)[pair]).reshape(-1))
    breaks = np.flatnonzero(np.diff(rows) != 1)
    return rows[np.r_[0, breaks + 1]], rows[np.r_[breaks, len(rows) - 1]] + 1


# ── what is needed ──


def needed_of(program: Program, stage: Stage, operand: Operand, deal: Deal, owned: Spans, workers: int, tile_rows: int) -> Spans:
    """What every worker reads of ``operand``. Raises PlanError for an access the stage cannot make."""
    buffer = program.buffer(operand.buffer)
    if operand.access == "best":
        reader = np.repeat(np.arange(workers), len(owned))
        return Spans.of(reader, np.tile(owned.low, workers), np.tile(owned.high, workers))
    if operand.access == "all_lanes":
        readers = np.unique(deal.worker)
        return Spans.of(readers, np.zeros_like(readers), np.full_like(readers, buffer.lanes * buffer.width))
    if operand.access == "rank":
        reader = np.unique(deal.worker)
        rank = reader * buffer.lanes // workers
        return _placed(reader, rank, np.zeros_like(reader), np.full_like(reader, buffer.width), buffer)
    if buffer.lanes > 1 and stage.lanes != buffer.lanes and operand.access != "rows_all_lanes":
        raise PlanError(
            f"stage {stage.name} ({stage.lanes} lanes) reads {operand.name} of buffer {buffer.name} ({buffer.lanes} lanes) "
            f"as {operand.access!r}, but has no lane of its own there: use all_lanes"
        )
    if operand.access == "lane":
        reader, lane = deal.lanes()
        return _placed(reader, lane, np.zeros_like(reader), np.full_like(reader, buffer.width), buffer)
    if operand.access in ("heads", "cache"):
        return _heads(stage, operand, deal, buffer)
    if operand.access == "records":
        return _records(stage, deal, buffer, tile_rows)
    if operand.access in ("rows", "rows_all_lanes"):
        return _own_rows(stage, operand, deal, buffer, tile_rows)
    raise PlanError(f"stage {stage.name} reads {operand.name} by the unknown access {operand.access!r}")


def _heads(stage: Stage, operand: Operand, deal: Deal, buffer: Buffer) -> Spans:
    """q of the query heads that belong to the run's kv heads, or the order of those kv heads' appends."""
    core = stage.attention
    per_head = core.head_dim * (core.heads // core.kv_heads if operand.access == "heads" else 1)
    low = deal.first // core.splits
    high = (deal.first + deal.count - 1) // core.splits + 1
    return _placed(deal.worker, deal.lane, low * per_head, high * per_head, buffer)


def _records(stage: Stage, deal: Deal, buffer: Buffer, tile_rows: int) -> Spans:
    """All records of the heads that the run's rows belong to."""
    core = stage.combine
    per_head = core.splits * (core.head_dim + 2)
    low = deal.first * tile_rows // core.head_dim
    last = np.minimum((deal.first + deal.count) * tile_rows, core.width)
    high = -(-last // core.head_dim)
    return _placed(deal.worker, deal.lane, low * per_head, high * per_head, buffer)


def _own_rows(stage: Stage, operand: Operand, deal: Deal, buffer: Buffer, tile_rows: int) -> Spans:
    users = {i for i, part in enumerate(stage.parts) if any(operand.name in op.inputs for op in part.epilogue)}
    found = []
    for part_index in users or range(len(stage.parts)):
        mine = deal.of_parts({part_index})
        index, low, high = _rows(stage, part_index, mine, tile_rows)
        everywhere = operand.access == "rows_all_lanes"
        found.append(_placed(mine.worker[index], mine.lane[index], low, high, buffer, everywhere))
    return Spans.joined(found)


def prologue_operands(stage: Stage) -> set[int]:
    """Numbers of the operands that are read before the units begin; the others are read by epilogues only."""
    if stage.kind != "matvec":
        return set(range(len(stage.operands)))
    names = {stage.vector, *(name for op in stage.prologue for name in op.inputs)}
    return {number for number, operand in enumerate(stage.operands) if operand.name in names}
