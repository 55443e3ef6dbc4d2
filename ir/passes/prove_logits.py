"""Prove that whoever samples finds every logit: each is made by one worker, and that worker has told everybody since."""

from __future__ import annotations

import numpy as np

from kogc.ir.passes.spans import PlanError
from kogc.ir.program import Program, Schedule, Stage, WorkerStage


def check_logits(program: Program, schedule: Schedule) -> None:
    """Raises PlanError, naming the word, unless the runs of the head make every logit of the vocabulary exactly once.

    Logits that are kept for the sampler are part of what their maker publishes as its best (docs/sampling.md): they are stored
    before it, read by nobody who has not heard of it, and lie in as many slots. So the walk that proves waits, sends and slots of the
    best ones proves those of the kept ones, provided that the makers are all there and do not get in each other's way.
    """
    for segment, iteration, number, stage in program.instances():
        heads = [i for i, part in enumerate(stage.parts) if any(output.kind == "logits" for output in part.outputs)]
        if not heads:
            continue
        made = _times_made(program.vocab, stage, heads, schedule.work[segment][number][iteration], schedule.tile_rows)
        for word in np.flatnonzero(made != 1)[:1]:
            raise PlanError(
                f"stage {stage.name}, iteration {iteration}: the logit of word {word} is made {made[word]} times, not once: correct the deal of its rows"
            )


def _times_made(vocab: int, stage: Stage, heads: list[int], work: tuple[WorkerStage, ...], tile_rows: int) -> np.ndarray:
    """How often every logit is made: int [vocab]."""
    made = np.zeros(vocab, np.int64)
    for run in (run for one in work for run in one.runs if run.part in heads):
        rows = stage.part_rows(stage.parts[run.part])
        low, high = run.first * tile_rows, min((run.first + run.count) * tile_rows, rows)
        made[run.lane * rows + low : run.lane * rows + high] += 1
    return made
