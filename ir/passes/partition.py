"""Partition: which lanes and rows of the model each rank owns."""

from __future__ import annotations

from dataclasses import dataclass

from kogc.ir.graph import Graph


@dataclass(frozen=True)
class Partitioned:
    """A decode graph dealt to ranks: ``graphs[r]`` is what rank r runs, ``lanes[r]`` the model's lanes it owns."""

    ranks: int
    graphs: tuple[Graph, ...]
    lanes: tuple[tuple[int, ...], ...]


def partition(graph: Graph, ranks: int = 1) -> Partitioned:
    """Deal ``graph`` to ``ranks`` ranks. One rank owns everything and runs the graph as it is.

    Raises:
        ValueError: ``ranks`` is below 1 or does not divide the lanes.
        NotImplementedError: more than one rank (issue 4).
    """
    lanes = lane_count(graph)
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}, expected at least 1")
    if lanes > 1 and lanes % ranks:
        raise ValueError(f"{ranks} ranks do not divide the {lanes} lanes of {graph.name}")
    if ranks > 1:
        raise NotImplementedError(f"{ranks} ranks: programs of more than one rank are not built yet")
    return Partitioned(1, (graph,), (tuple(range(lanes)),))


def lane_count(graph: Graph) -> int:
    """Lanes of the model: the widest lane axis of a linear's weight, 1 without lanes."""
    weights = (graph[node.inputs[1]].type.shape for node in graph if node.op == "linear")
    return max((shape[0] for shape in weights if len(shape) == 3), default=1)
