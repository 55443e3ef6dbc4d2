"""The fused decode step: which decode ops run together, in which role, before workers must exchange values."""

from __future__ import annotations

from dataclasses import dataclass

from kogc.ir.graph import Graph

STAGE_KINDS = ("embed", "matvec", "rows", "attention", "sample")


@dataclass(frozen=True)
class PartGroup:
    """Rows of one matvec that are finished together, or rows of vectors that were made before (``rows``: no linears).

    ``linears`` are one node, or two (gate, up) whose rows i meet in the epilogue. ``epilogue`` are row-wise nodes in
    execution order. ``outputs`` are the node values that leave the stage here (published, appended to a cache, logits).
    """

    linears: tuple[str, ...]
    epilogue: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class StageGroup:
    """One stage as node names of the plan's graph.

    ``prologue`` nodes are computed by every worker on whole vectors; ``prologue_outputs`` are those whose values later
    stages need: each worker publishes its share of the rows. ``vector`` is the value the dots read (matvec only).
    ``core`` is the embed / attention_partial / sample node of the other kinds; their row-wise epilogue is in ``parts[0]``
    with no linears (embed only). ``title`` is readable; ``block`` the module the stage belongs to, as an identifier
    (``self_attn``); ``layer`` the numbered module around it (``layers.3``), None outside the layers.
    """

    name: str
    kind: str
    prologue: tuple[str, ...] = ()
    prologue_outputs: tuple[str, ...] = ()
    vector: str | None = None
    core: str | None = None
    parts: tuple[PartGroup, ...] = ()
    title: str = ""
    block: str = ""
    layer: str | None = None


@dataclass(frozen=True)
class StagePlan:
    """A decode graph cut into stages, in execution order. Values cross stages only through published outputs."""

    graph: Graph
    stages: tuple[StageGroup, ...]
