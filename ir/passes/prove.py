"""Prove a sync plan: no deadlock, no read of an unwritten value, no overwrite of a value that somebody still needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kogc.ir.passes.exchange import SyncPlan, sync_plan
from kogc.ir.passes.prove_logits import check_logits
from kogc.ir.passes.prove_walk import Overwrite, Walk
from kogc.ir.passes.spans import PlanError
from kogc.ir.program import Program, Schedule

#: The step makes logits and samples; or it only takes prompt tokens in.
TOKEN, PROMPT = "token", "prompt"


@dataclass(frozen=True)
class Proof:
    """What was proven: sequences of step kinds that were walked, waits and reads of one step, overwrites looked at."""

    sequences: tuple[tuple[str, ...], ...]
    waits: int
    reads: int
    overwrites: int


def prove(
    program: Program,
    schedule: Schedule,
    steps: int = 3,
    step_kinds: Sequence[Sequence[str]] | None = None,
    tagged: bool = False,
) -> Proof:
    """Prove program and schedule for any number of steps, first use included.

    Write w of step s of a buffer has index s · writes_per_step + w and lies in slot index mod slots. Shown are:
    every wait ends; every element read was published before, into the memory of the reader's rank, and the reader waited for
    its maker or for somebody who knew of it; a slot is rewritten only after everybody who made or read the old value is provably done with it. Cache
    appends count as values: who reads a head's cache has heard, in this step, from whoever appends to it, who made the
    earlier positions too (the deal is the same in every step). Every logit is made once, by somebody whose word all samplers have.

    ``step_kinds``: sequences of ``token`` and ``prompt`` steps to walk; by default every combination that matters for
    slots that live up to ``steps`` steps. What holds between two steps depends only on their distance and on the kinds
    of the steps from one to the other, so a few short sequences stand for all. ``tagged``: consumers poll the values
    themselves and may see them before their maker's stage is done, as on the GPUs.

    Raises PlanError naming stage, worker, buffer, write and the remedy.
    """
    _check_caches(program)
    check_logits(program, schedule)
    return prove_plan(sync_plan(program, schedule), steps, step_kinds, tagged)


def prove_plan(plan: SyncPlan, steps: int = 3, step_kinds: Sequence[Sequence[str]] | None = None, tagged: bool = False) -> Proof:
    """``prove`` for a sync plan that is already there."""
    walk = Walk(plan, tagged)
    slots = _slots(plan)
    sequences = tuple(tuple(kinds) for kinds in step_kinds or _sequences(plan, max(steps, _lifetime(plan, slots))))
    overwrites = sum(walk.run([kind == TOKEN for kind in kinds], slots, _reject) for kinds in sequences)
    waits = sum(int(wait.producers.sum()) for instance in plan.instances for wait in instance.waits)
    reads = sum(len(read.spans) for instance in plan.instances for read in instance.reads)
    return Proof(sequences, waits, reads, overwrites)


def settle_slots(
    program: Program,
    schedule: Schedule,
    steps: int = 3,
    tagged: bool = False,
    step_kinds: Callable[[int], Sequence[Sequence[str]]] | None = None,
) -> Program:
    """The program with the fewest slots per buffer that prove; buffers of caches carry no data and keep one.

    ``step_kinds`` gives the sequences of steps to walk for a number of steps; by default those that ``prove`` walks.

    Raises PlanError when no number of slots within two steps' writes is enough.
    """
    _check_caches(program)
    plan = sync_plan(program, schedule)
    walk = Walk(plan, tagged)
    slots = dict.fromkeys(plan.buffers, 1)

    def grow(overwrite: Overwrite) -> None:
        name = overwrite.buffer
        if slots[name] > 2 * plan.buffers[name].writes_per_step:
            raise PlanError(f"{overwrite}; {slots[name]} were not enough, so the plan lacks a wait")
        slots[name] += 1

    proven: set[tuple[str, ...]] = set()
    sequences = step_kinds or partial(_sequences, plan)
    while open_ones := [kinds for kinds in sequences(max(steps, _lifetime(plan, slots))) if kinds not in proven]:
        before = dict(slots)
        walk.run([kind == TOKEN for kind in open_ones[0]], slots, grow)
        proven = proven | {open_ones[0]} if slots == before else set()
    return replace(program, buffers=tuple(replace(buffer, slots=slots[buffer.name]) for buffer in program.buffers))


def sampled_steps(steps: int) -> list[tuple[str, ...]]:
    """Steps in which all workers meet at the sampler, prompt or not: what kernels do that keep the sampler's waits and
    publishes in prompt steps. For plans that need it: lanes that never exchange are held together by nothing else."""
    return [(TOKEN,) * steps]


def _slots(plan: SyncPlan) -> dict[str, int]:
    for buffer in plan.buffers.values():
        if buffer.slots < 1:
            raise PlanError(f"buffer {buffer.name} has {buffer.slots} slots; it needs at least one")
    return {name: buffer.slots for name, buffer in plan.buffers.items()}


def _reject(overwrite: Overwrite) -> None:
    raise PlanError(str(overwrite))


def _lifetime(plan: SyncPlan, slots: dict[str, int]) -> int:
    """Steps to walk so that a slot is written again at every place of a step."""
    data = [buffer for buffer in plan.buffers.values() if buffer.payload != "cache"]
    return 1 + max((-(-slots[buffer.name] // buffer.writes_per_step) for buffer in data), default=1)


def _sequences(plan: SyncPlan, steps: int) -> list[tuple[str, ...]]:
    """Steps of one kind throughout; a token step before or after prompt steps; two token steps any distance apart.

    Prompt steps in between are the hard case: a token step only adds waits.
    """
    if not any(instance.head for instance in plan.instances):
        return [(TOKEN,) * steps]
    apart = [(TOKEN, *(PROMPT,) * between, TOKEN) for between in range(1, steps - 1)]
    return [(PROMPT,) * steps, (TOKEN,) * steps, (TOKEN, *(PROMPT,) * (steps - 1)), (*(PROMPT,) * (steps - 1), TOKEN), *apart]


def _check_caches(program: Program) -> None:
    for cache in program.caches:
        if cache.capacity < program.capacity:
            raise PlanError(
                f"cache {cache.key} holds {cache.capacity} positions of a context of {program.capacity}: its positions would be "
                "rewritten while others may read them, which this plan does not order"
            )
