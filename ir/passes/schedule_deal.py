"""Dealing units to workers: contiguous ranges, balanced in bytes over the whole token."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np

from kogc.ir.passes.elements import Deal
from kogc.ir.program import Program, Stage
from kogc.ir.types import NUMPY_DTYPES


@dataclass(frozen=True)
class Block:
    """``units`` consecutive units of one part and lane, each ``weight`` bytes heavy."""

    lane: int
    part: int
    units: int
    weight: float


class Dealer:
    """Deals stage after stage and remembers every worker's bytes so far, so that remainders go to whoever has least.

    Lanes and workers are split into ``gcd(lanes, workers)`` equal domains that never mix: with workers a multiple of
    lanes every lane has its own workers, with lanes a multiple of workers every worker has whole lanes; else a domain's
    lanes lie side by side and a worker on a border has a piece of both, which balances where closed groups could not.
    """

    def __init__(self, program: Program, workers: int, tile_rows: int, context: int) -> None:
        self.program, self.workers, self.tile_rows, self.context = program, workers, tile_rows, context
        self.bytes = np.zeros(workers)

    def deal(self, stage: Stage, iteration: int) -> Deal:
        """The runs of one stage instance, in worker order."""
        blocks = self._blocks(stage, iteration)
        if not blocks:
            return Deal.of([])
        domains = gcd(stage.lanes, self.workers)
        lanes, size = stage.lanes // domains, self.workers // domains
        rows = []
        for domain in range(domains):
            mine = [b for b in blocks if b.lane // lanes == domain]
            rows += self._deal_domain(mine, slice(domain * size, (domain + 1) * size))
        return Deal.of(rows)

    def _blocks(self, stage: Stage, iteration: int) -> list[Block]:
        if stage.kind == "sample":
            return []
        weights = self._unit_bytes(stage, iteration)
        units = [stage.units(part, self.tile_rows) for part in range(len(weights))]
        return [Block(lane, part, units[part], weights[part]) for lane in range(stage.lanes) for part in range(len(weights))]

    def _unit_bytes(self, stage: Stage, iteration: int) -> list[float]:
        """Bytes a unit of each part streams from memory; for stages that stream nothing, those it reads of what others made."""
        item = NUMPY_DTYPES[self.program.dtype].itemsize
        if stage.kind == "embed":
            return [self.tile_rows * item]
        if stage.kind == "rows":
            lanes = sum(o.lanes if o.access == "rows_all_lanes" else 1 for o in stage.operands)
            return [part.arity * self.tile_rows * lanes * NUMPY_DTYPES["fp32"].itemsize for part in stage.parts]
        if stage.combine:
            return [self.tile_rows * stage.combine.splits * NUMPY_DTYPES["fp32"].itemsize]
        if stage.attention:
            core = stage.attention
            window = core.windows[iteration if len(core.windows) > 1 else 0]
            visible = min(self.context, self.program.capacity, window or self.program.capacity)
            return [2 * core.head_dim * visible * item / core.splits]
        return [part.arity * self.tile_rows * part.k * item for part in stage.parts]

    def _deal_domain(self, blocks: list[Block], workers: slice) -> list[tuple[int, int, int, int, int]]:
        ends = np.cumsum([block.units for block in blocks])
        weights = np.array([block.weight for block in blocks])
        loads = self.bytes[workers]
        if (weights == weights[0]).all():
            cuts = _even_cuts(int(ends[-1]), loads)
        else:
            cuts = _weighed_cuts(np.repeat(weights, [block.units for block in blocks]), loads)
        before = np.r_[0, np.cumsum(np.repeat(weights, [block.units for block in blocks]))]
        self.bytes[workers] += before[cuts[1:]] - before[cuts[:-1]]
        return _runs(blocks, ends, cuts, workers.start)


def _even_cuts(units: int, loads: np.ndarray) -> np.ndarray:
    """Equal units: everybody gets the same number, the least loaded workers one more."""
    counts = np.full(len(loads), units // len(loads))
    counts[np.argsort(loads, kind="stable")[: units % len(loads)]] += 1
    return np.r_[0, np.cumsum(counts)]


def _weighed_cuts(weights: np.ndarray, loads: np.ndarray) -> np.ndarray:
    """Unequal units: each worker's fair share, corrected by what it is behind or ahead, cut at the nearest unit border."""
    heaviest = weights.max()
    ends = np.r_[0, np.cumsum(weights)]
    want = ends[-1] / len(loads) + np.clip(loads.mean() - loads, -heaviest, heaviest)
    want = np.maximum(want, 0)
    targets = np.cumsum(want) * (ends[-1] / want.sum())
    above = np.clip(np.searchsorted(ends, targets), 1, len(ends) - 1)
    nearest = np.where(targets - ends[above - 1] < ends[above] - targets, above - 1, above)
    nearest[-1] = len(weights)
    return np.r_[0, nearest]


def _runs(blocks: list[Block], ends: np.ndarray, cuts: np.ndarray, first_worker: int) -> list[tuple[int, int, int, int, int]]:
    """The ranges between ``cuts`` as (worker, lane, part, first, count), split where a block ends."""
    rows, block = [], 0
    starts, ends = (ends - [b.units for b in blocks]).tolist(), ends.tolist()
    for number, (low, high) in enumerate(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)):
        while low < high:
            while ends[block] <= low:
                block += 1
            stop = min(high, ends[block])
            rows.append((first_worker + number, blocks[block].lane, blocks[block].part, low - starts[block], stop - low))
            low = stop
    return rows
