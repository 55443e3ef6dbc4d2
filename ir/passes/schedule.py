"""Schedule: who does which units of every stage instance, and for exactly whose values each worker waits."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kogc.ir.passes.elements import Deal, made_by, needed_of, prologue_operands
from kogc.ir.passes.schedule_deal import Dealer
from kogc.ir.passes.spans import PlanError, Spans, missing, needs
from kogc.ir.program import Program, Run, Schedule, Share, Stage, WorkerStage

Intervals = tuple[tuple[int, int], ...]

#: Context length at which the cache bytes of attention are weighed against weight bytes.
REFERENCE_CONTEXT = 1024


def schedule(program: Program, workers: int, tile_rows: int, context: int = REFERENCE_CONTEXT) -> Schedule:
    """Deal every stage's units to ``workers`` and derive the waits.

    A worker is expected to wait for the operands its prologue reads first, and for those that only its epilogues read
    after them, at any time before it reads them.

    ``tile_rows``: rows of a tile. ``context``: positions at which attention units are weighed. Workers that own no units
    of a stage have no runs there and await nothing (``sample`` excepted: everybody chooses the next token). A wait that an
    earlier wait of the same worker for the same write covers is left out.

    Raises PlanError when a stage reads what no earlier stage of the step makes.
    """
    if workers < 1 or tile_rows < 1:
        raise PlanError(f"a schedule needs at least one worker and one row a tile, not {workers} and {tile_rows}")
    state = _State(Dealer(program, workers, tile_rows, context))
    work = [[[] for _ in segment.stages] for segment in program.segments]
    for segment, iteration, number, stage in program.instances():
        work[segment][number].append(_stage_work(state, stage, iteration))
    return Schedule(workers, tile_rows, tuple(tuple(tuple(its) for its in stages) for stages in work))


@dataclass
class _State:
    """What is known while walking the step: who made each write, and which producers each worker has waited for."""

    dealer: Dealer
    owned: dict[tuple[str, int], Spans] = field(default_factory=dict)
    seen: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)


def _stage_work(state: _State, stage: Stage, iteration: int) -> tuple[WorkerStage, ...]:
    dealer = state.dealer
    deal = dealer.deal(stage, iteration)
    shares = _shares(dealer, stage, deal)
    early = prologue_operands(stage)
    order = sorted(range(len(stage.operands)), key=lambda number: number not in early)
    found = {number: _awaits(state, stage, iteration, number, deal) for number in order}
    awaits = [found[number] for number in range(len(stage.operands))]
    for made in made_by(dealer.program, stage, iteration, deal, shares, dealer.workers, dealer.tile_rows):
        if (made.buffer, made.write) in state.owned:
            raise PlanError(
                f"stage {stage.name}, iteration {iteration}: write {made.write} of buffer {made.buffer} is made twice in a step"
            )
        state.owned[made.buffer, made.write] = made.spans
    runs: list[list[Run]] = [[] for _ in range(dealer.workers)]
    for worker, *run in zip(*(a.tolist() for a in (deal.worker, deal.lane, deal.part, deal.first, deal.count)), strict=True):
        runs[worker].append(Run(*run))
    mine: list[list[Share]] = [[] for _ in range(dealer.workers)]
    for worker, share in shares:
        mine[worker].append(share)
    return tuple(
        WorkerStage(tuple(runs[w]), tuple(one[w] for one in awaits), tuple(mine[w])) for w in range(dealer.workers)
    )


def _shares(dealer: Dealer, stage: Stage, deal: Deal) -> list[tuple[int, Share]]:
    """Split the rows of every prologue output over the workers that compute it, in pieces of whole tiles."""
    shares = []
    lanes_of = np.unique(np.stack([deal.worker, deal.lane], 1), axis=0)
    for number, output in enumerate(stage.prologue_outputs):
        buffer = dealer.program.buffer(output.buffer)
        op = next((op for op in stage.prologue if op.name == output.value), None)
        if op is None:
            raise PlanError(f"stage {stage.name} publishes {output.value}, which its prologue does not compute")
        for lane in range(buffer.lanes):
            everybody = op.scope == "all" or buffer.lanes == 1
            computing = np.unique(lanes_of[:, 0] if everybody else lanes_of[lanes_of[:, 1] == lane, 0])
            shares += _split_rows(number, lane, buffer.width, computing.tolist(), dealer.tile_rows)
    return shares


def _split_rows(output: int, lane: int, width: int, workers: list[int], tile_rows: int) -> list[tuple[int, Share]]:
    tiles = -(-width // tile_rows)
    cuts = [min(tiles * i // len(workers) * tile_rows, width) for i in range(len(workers) + 1)]
    pieces = zip(workers, cuts[:-1], cuts[1:], strict=True)
    return [(worker, Share(output, lane, low, high)) for worker, low, high in pieces if low < high]


# ── waits ──


def _awaits(state: _State, stage: Stage, iteration: int, number: int, deal: Deal) -> list[Intervals]:
    """For every worker the intervals of producers of operand ``number`` that it has not waited for yet."""
    dealer, operand = state.dealer, stage.operands[number]
    key = (operand.buffer, operand.write.at(iteration))
    owned = state.owned.get(key)
    if owned is None:
        raise PlanError(
            f"stage {stage.name}, iteration {iteration} reads write {key[1]} of buffer {key[0]} ({operand.name}), "
            "which no earlier stage of the step makes"
        )
    reads = needed_of(dealer.program, stage, operand, deal, owned, dealer.workers, dealer.tile_rows)
    hole = missing(reads, owned)
    if hole is not None:
        raise PlanError(
            f"stage {stage.name}, iteration {iteration}: worker {reads.worker[hole]} reads elements {reads.low[hole]} … "
            f"{reads.high[hole]} of buffer {key[0]}, write {key[1]} ({operand.name}), and not all of them are made"
        )
    wanted = needs(reads, owned, dealer.workers)
    seen = state.seen.get(key, np.zeros_like(wanted))
    state.seen[key] = seen | wanted
    return _intervals(_without_self(wanted & ~seen))


def _without_self(wanted: np.ndarray) -> np.ndarray:
    """Nobody waits for itself, unless leaving itself out would tear one interval into two."""
    own = np.arange(len(wanted))
    sides = np.pad(wanted, ((0, 0), (1, 1)))
    torn = sides[own, own] & sides[own, own + 2]
    wanted = wanted.copy()
    wanted[own, own] &= torn
    return wanted


def _intervals(wanted: np.ndarray) -> list[Intervals]:
    """bool [reader, producer] as producer intervals of every reader."""
    edges = np.diff(np.pad(wanted, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    reader, low = np.nonzero(edges == 1)
    _, high = np.nonzero(edges == -1)
    found: list[list[tuple[int, int]]] = [[] for _ in wanted]
    for who, *interval in zip(reader.tolist(), low.tolist(), high.tolist(), strict=True):
        found[who].append(tuple(interval))
    return [tuple(intervals) for intervals in found]
