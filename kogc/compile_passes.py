"""The passes in their order: traced graph in, rendered kernel out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kogc.codegen.pack_index import PackIndex
from kogc.codegen.rank_pack import rank_indices, whole_index
from kogc.codegen.render import Rendered, render
from kogc.dump import Dump
from kogc.frontend.errors import FrontendError
from kogc.frontend.model_input import ModelInput
from kogc.frontend.trace import trace
from kogc.ir.graph import Graph, Node
from kogc.ir.ops import has_op
from kogc.ir.passes.across_ranks import across_ranks, own_lookups
from kogc.ir.passes.fuse import fuse
from kogc.ir.passes.partition import partition
from kogc.ir.passes.prove import prove, sampled_steps, settle_slots
from kogc.ir.passes.rank_sums import sums_in_every_rank
from kogc.ir.passes.recognize import recognize
from kogc.ir.passes.roll import roll
from kogc.ir.passes.schedule import schedule
from kogc.ir.passes.schedule_splits import choose_splits, with_splits
from kogc.ir.passes.separate_combine import separate_combine
from kogc.ir.passes.separate_rows import separate_rows
from kogc.ir.passes.spans import PlanError
from kogc.ir.passes.views import separate_views
from kogc.ir.program import Program, Schedule
from kogc.ir.verify import verify
from kogc.targets import Target
from kogc.targets.toolchains import load_toolchain
from kogc.verify import Progress


@dataclass(frozen=True)
class Planned:
    """Everything about a kernel except its weights: the decode graph it computes, what it does, who does it, its text.
    ``leaves`` say how its weights are made from the model's (``ViewedWeights``); ``indices`` where they lie in each rank's pack."""

    graph: Graph
    program: Program
    schedule: Schedule
    indices: tuple[PackIndex, ...]
    rendered: Rendered
    leaves: Mapping[str, Node]


def plan(model: ModelInput, dtype: str, workers: int, target: Target, dump: Dump, tell: Progress, ranks: int = 1) -> Planned:
    """Run all passes on ``model`` without reading a weight, for ``ranks`` ranks of ``workers`` workers each. Every pass's result
    is verified and handed to ``dump``.

    Raises FrontendError, UnrecognizedOp, GraphError: naming the op and the line of the user's model; PartitionError when the
    model does not divide over the ranks.
    """
    graph = decode_graph(model, dump, tell)
    tell("planning", 0, 0)
    part = verify(partition(graph, ranks))
    dump("partition", part)
    viewed = separate_views(part)
    part = verify(viewed.graph)
    dump("views", part)
    stages = fuse(part)
    verify(stages.graph)
    dump("stages", stages)
    capacity = _context(model, part)
    rolled = roll(stages, capacity, dtype, tuple(target.facts["step_tokens"]), model.name)
    rolled = own_lookups(replace(rolled, ranks=ranks))
    split = sums_in_every_rank(_separated(with_splits(rolled, choose_splits(rolled, ranks * workers)), target))
    work = schedule(split, ranks * workers, target.tile_rows)
    tell("proving the sync plan", 0, 0)
    tagged = target.near_floats is not None
    program = _proven(across_ranks(split, work, tagged), work, tagged)
    dump("program", program)
    dump("schedule", work)
    tell("rendering", 0, 0)
    rendered = emit(program, work, target)
    dump("kernel", rendered.source, Path(load_toolchain(target.name).SOURCE_MEMBER).suffix)
    return Planned(part, program, work, rank_indices(program, work, target.layout), rendered, viewed.leaves)


def emit(program: Program, work: Schedule, target: Target) -> Rendered:
    """The source of a scheduled program for ``target``, whose weights lie one rank's after the other's."""
    return render(program, work, target, whole_index(program, work, target.layout))


def _separated(program: Program, target: Target) -> Program:
    """The program with stages that bring attention's splits or lanes together, where every worker would read too much for it:
    more than the target's ``combine_words`` of partials a lane, or ``rows_words`` of several lanes. A target without such a fact
    reads any number."""
    for fact, separate in (("combine_words", separate_combine), ("rows_words", separate_rows)):
        if fact in target.facts:
            program = separate(program, target.facts[fact])
    return program


def _proven(program: Program, work: Schedule, tagged: bool) -> Program:
    """The program with slots under which its sync plan is safe, even if prompt steps dropped the sampler; else, with the
    sampler's waits in every step, which the templates keep. ``tagged``: words are their own flags. Raises PlanError when
    that is not safe either."""
    try:
        settled = settle_slots(program, work, tagged=tagged)
        prove(settled, work, tagged=tagged)
    except PlanError:
        settled = settle_slots(program, work, step_kinds=sampled_steps, tagged=tagged)
        steps = 3 + max(buffer.slots for buffer in settled.buffers)
        prove(settled, work, step_kinds=sampled_steps(steps), tagged=tagged)
    return settled


def _context(model: ModelInput, graph: Graph) -> int:
    """Positions to compile for. Raises FrontendError when the model's caches hold fewer than were asked for."""
    held = min(node.type.shape[1] for node in graph if node.op == "cache")
    if model.context is not None and model.context > held:
        raise FrontendError(f"{model.name}: a context of {model.context} was asked for, its caches hold {held} positions")
    return model.context or held


def decode_graph(model: ModelInput, dump: Dump, tell: Progress) -> Graph:
    """Trace ``model`` and recognise its decode ops."""
    tell("tracing", 0, 0)
    traced = trace(model.module, model.context, name=model.name)
    if all(has_op(node.op) for node in traced):  # the recogniser has more to say about an op that nobody knows
        verify(traced)
    dump("trace", traced)
    tell("recognising", 0, 0)
    graph = verify(recognize(traced))
    dump("decode", graph)
    return graph
