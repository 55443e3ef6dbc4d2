"""Partition: the decode graph in as many lanes as ranks need, each of which is some rank's alone."""

from __future__ import annotations

from collections.abc import Iterable

from kogc.ir.graph import Graph
from kogc.ir.passes.cut import Uncuttable, Undivided, cut

#: Numbers of ranks up to this one are looked at for one that divides a model.
MOST_TRIED = 16


class PartitionError(ValueError):
    """A model that does not divide over the ranks. The message names what does not divide, and which numbers would."""


def partition(graph: Graph, ranks: int = 1) -> Graph:
    """``graph`` with lanes that divide over ``ranks`` ranks: rank r owns the r-th part of them, in their order.

    A model's own lanes are dealt whole, so that its graph stays as it is; one without lanes is cut into as many as there are
    ranks. One rank owns everything.

    Raises PartitionError.
    """
    if ranks < 1:
        raise PartitionError(f"ranks is {ranks}, expected at least 1")
    lanes = lane_count(graph)
    if ranks == 1:
        return graph
    if lanes > 1 and lanes % ranks:
        raise _refusal(ranks, f"the {lanes} lanes of {graph.name}", [n for n in range(1, lanes + 1) if lanes % n == 0])
    if lanes > 1:
        return graph
    try:
        return cut(graph, ranks)
    except Uncuttable as op:
        raise PartitionError(f"{graph.name} runs on one rank only: {op} cannot be cut") from None
    except Undivided as obstacle:
        raise _refusal(ranks, str(obstacle), [1, *(n for n in range(2, MOST_TRIED + 1) if _divides(graph, n))]) from None


def _divides(graph: Graph, ranks: int) -> bool:
    try:
        return bool(cut(graph, ranks))
    except (Undivided, Uncuttable):
        return False


def lane_count(graph: Graph) -> int:
    """Lanes of the model: the widest lane axis of a linear's weight, 1 without lanes."""
    weights = (graph[node.inputs[1]].type.shape for node in graph if node.op == "linear")
    return max((shape[0] for shape in weights if len(shape) == 3), default=1)


def _refusal(ranks: int, what: str, possible: Iterable[int]) -> PartitionError:
    """What to raise when ``ranks`` do not divide ``what``; ``possible`` numbers of ranks would."""
    *most, last = map(str, possible)
    choice = f"{', '.join(most)} or {last}" if most else last
    return PartitionError(f"{ranks} ranks do not divide {what}; {choice} would")
