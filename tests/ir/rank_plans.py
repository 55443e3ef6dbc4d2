"""Plans for several ranks, and what they send."""

from __future__ import annotations

from dataclasses import replace

from decode_builder import Built
from plan_check import rolled

from kogc.ir.passes.across_ranks import across_ranks, own_lookups
from kogc.ir.passes.exchange import sync_plan
from kogc.ir.passes.prove import settle_slots
from kogc.ir.passes.schedule import schedule
from kogc.ir.passes.schedule_splits import choose_splits, with_splits
from kogc.ir.program import Program, Schedule

TILE = 4


def dealt(model: Built, ranks: int, workers: int) -> tuple[Program, Schedule]:
    """The program for ``ranks`` ranks of ``workers`` workers, its slots settled, and its schedule."""
    program = own_lookups(replace(rolled(model), ranks=ranks))
    program = with_splits(program, choose_splits(program, ranks * workers))
    plan = schedule(program, ranks * workers, TILE)
    return settle_slots(across_ranks(program, plan), plan), plan


def sent(program: Program) -> dict[str, list[int]]:
    """Where the writes of every buffer go, in their order."""
    found: dict[str, list[int]] = {}
    for instance in sync_plan(program, schedule(program, 2 * program.ranks, TILE)).instances:
        for publish in instance.publishes:
            found.setdefault(publish.buffer, []).append(publish.sent_to)
    return found
