"""Where every node of a stage-level graph is computed: which stage, and there in prologue, core or epilogue."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kogc.ir.graph import LEAF_OPS, Graph, GraphError, Node, where
from kogc.ir.ops import op_row

#: Reductions over lanes that an epilogue can do row by row once every lane's vector is there.
LANE_REDUCTIONS = ("lane_others", "lane_sum", "lane_mean")
#: Row-wise ops bound to the rows of one matrix: they cannot be moved to another stage's epilogue.
_BOUND_TO_PART = ("rope", "kv_append")


@dataclass(eq=False)
class DraftPart:
    """Linears whose rows meet, and the row-wise nodes after them. ``handed_on``: a value of the prologue that the part of a
    ``rows`` stage begins with."""

    linears: list[str]
    epilogue: list[str] = field(default_factory=list)
    handed_on: list[str] = field(default_factory=list)

    def made(self, stage: Draft) -> Iterable[str]:
        """Nodes whose rows this part makes, in execution order (for embed the core is one)."""
        core = [stage.core] if stage.core else []
        return (*(self.linears or core), *self.handed_on, *self.epilogue)


@dataclass(eq=False)
class Draft:
    """A stage while it grows."""

    index: int
    kind: str
    core: str | None = None
    vector: str | None = None
    prologue: list[str] = field(default_factory=list)
    parts: list[DraftPart] = field(default_factory=list)


@dataclass(frozen=True)
class Place:
    """``role`` is ``prologue``, ``core`` (attention, sample: no row-wise part) or ``rows`` (made, or handed on, row by row in ``part``)."""

    stage: int
    role: str
    part: DraftPart | None = None


@dataclass(frozen=True)
class Placement:
    stages: list[Draft]
    of: dict[str, Place]


def place(graph: Graph) -> Placement:
    """Place all nodes of a stage-level graph.

    Raises:
        GraphError: a node fits no role; names op and source.
    """
    return _Placer(graph).run()


class _Placer:
    """Walks the graph once. A node without a place *floats*: it is computed in the prologue of the first core that
    needs it, or pulled into a later epilogue that can compute it row by row."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.stages: list[Draft] = []
        self.of: dict[str, Place] = {}
        self.order = {node.name: index for index, node in enumerate(graph)}
        self.by_vector: dict[str, Draft] = {}

    def run(self) -> Placement:
        for node in self.graph:
            role = op_row(node.op).role
            if role == "core":
                getattr(self, f"_place_{node.op}", self._unknown_core)(node)
            elif role == "state":
                self._place_append(node)
            elif role in ("rowwise", "whole"):
                self._try_epilogue(node)
        return Placement(self.stages, self.of)

    # ── cores ──

    def _unknown_core(self, node: Node) -> None:
        raise self._unsupported(node, "no stage kind runs this op")

    def _place_embed(self, node: Node) -> None:
        if self._is_position_row(node):
            return  # it floats: a row of a table is at hand wherever something is added to it
        part = DraftPart([])
        stage = self._begin("embed", core=node.name, parts=[part])
        self.of[node.name] = Place(stage.index, "rows", part)

    def _place_linear(self, node: Node) -> None:
        vector, *weights = node.inputs
        for name in weights:
            if self.graph[name].op != "weight":
                raise self._unsupported(node, f"operand {name} ({self.graph[name].op}) must be a weight")
        stage = self.by_vector.get(vector)
        if stage is None:
            if self._is_leaf(vector):
                raise self._unsupported(node, f"the vector {vector} must be computed by an earlier op")
            stage = self._begin("matvec", vector=vector)
            self._settle(vector, stage)
            self.by_vector[vector] = stage
        part = DraftPart([node.name])
        stage.parts.append(part)
        self.of[node.name] = Place(stage.index, "rows", part)

    def _place_attention_partial(self, node: Node) -> None:
        q, keys, values, _ = node.inputs
        self._by_rows(q)
        for cache in (keys, values):
            if self.graph[cache].op != "kv_append":
                raise self._unsupported(node, f"cache {cache} is read before this step appends to it")
        stage = self._begin("attention", core=node.name)
        self.of[node.name] = Place(stage.index, "core")

    def _place_sample(self, node: Node) -> None:
        (logits,) = node.inputs
        if not self._made_by_rows(logits):
            raise self._unsupported(node, f"logits {logits} ({self.graph[logits].op}) are not made row by row", logits)
        stage = self._begin("sample", core=node.name)
        self.of[node.name] = Place(stage.index, "core")

    def _begin(self, kind: str, **more) -> Draft:
        stage = Draft(len(self.stages), kind, **more)
        self.stages.append(stage)
        return stage

    def _settle(self, name: str, stage: Draft) -> None:
        """Give every floating node that ``name`` depends on, and itself, a place in the prologue of ``stage``."""
        for name in self._floating(name):
            if self._is_position_row(self.graph[name]):
                raise self._unsupported(self.graph[name], "rows by position can only be added to something that is made row by row")
            stage.prologue.append(name)
            self.of[name] = Place(stage.index, "prologue")

    # ── rows of vectors that were made before ──

    def _by_rows(self, name: str) -> None:
        """Have ``name`` made row by row: as it is, or by a ``rows`` stage that computes in its prologue what needs whole vectors.

        Neighbouring values (queries and keys) share the stage.
        """
        if self._made_by_rows(name):
            return
        names = self._floating(name)
        whole = self._needed_whole(names)
        epilogue = [one for one in names if one not in whole]
        stage = self._rows_stage(names)
        part = DraftPart([])
        stage.parts.append(part)
        for one in whole:
            self._settle(one, stage)
        stage.prologue.sort(key=self.order.__getitem__)
        part.handed_on += [name] if name in whole else []
        part.epilogue += epilogue
        for one in (*epilogue, *part.handed_on):
            self.of[one] = Place(stage.index, "rows", part)
        turns = [one for one in epilogue if self.graph[one].op == "rope"]
        if len(turns) > 1:
            raise self._unsupported(self.graph[turns[1]], "a vector is turned twice")

    def _floating(self, name: str) -> list[str]:
        """``name`` and the floating nodes it depends on, in execution order."""
        names, waiting = set(), [name]
        while waiting:
            one = waiting.pop()
            if self._floats(one) and one not in names:
                names.add(one)
                waiting.extend(self.graph[one].inputs)
        return sorted(names, key=self.order.__getitem__)

    def _needed_whole(self, names: list[str]) -> list[str]:
        """Those of ``names`` that need whole vectors, and what they are computed from."""
        whole: set[str] = set()
        for name in reversed(names):
            if not self._is_rowwise(self.graph[name]) or any(user.name in whole for user in self.graph.users(name)):
                whole.add(name)
        return [name for name in names if name in whole]

    def _rows_stage(self, names: list[str]) -> Draft:
        """The last stage, if it is a ``rows`` stage that makes nothing ``names`` read; else a new one."""
        last = self.stages[-1]
        read = (self.of[operand] for name in names for operand in self.graph[name].inputs if operand in self.of)
        if last.kind == "rows" and all(place.stage < last.index or place.role == "prologue" for place in read):
            return last
        return self._begin("rows")

    # ── epilogues ──

    def _place_append(self, node: Node) -> None:
        x = node.inputs[1]
        self._by_rows(x)
        place = self.of[x]
        place.part.epilogue.append(node.name)
        self.of[node.name] = place

    def _try_epilogue(self, node: Node) -> None:
        """Put ``node`` behind the newest rows it reads, if a worker has all it needs there; else it floats."""
        made = [self.of[name] for name in node.inputs if self._made_by_rows(name)]
        if not made:
            return
        stage = self.stages[max(place.stage for place in made)]
        parts = list(dict.fromkeys(place.part for place in made if place.stage == stage.index))
        if not self._fits(node, stage, parts):
            return
        pulled: set[str] = set()
        for name in node.inputs:
            if not self._at_hand(name, stage, pulled):
                return
        part = self._merged(stage, parts)
        for name in (*sorted(pulled, key=self.order.__getitem__), node.name):
            part.epilogue.append(name)
            self.of[name] = Place(stage.index, "rows", part)

    def _fits(self, node: Node, stage: Draft, parts: list[DraftPart]) -> bool:
        """Whether ``node`` may run on the rows of ``parts``: its own kind, and whether the parts can be joined."""
        ops = [self.graph[name].op for part in parts for name in part.epilogue]
        if node.op == "lane_broadcast":
            # Every lane computes its own copy of the embedding, so nothing else may want the single one.
            return stage.kind == "embed" and len(self.graph.users(node.inputs[0])) == 1
        if node.op == "lane_concat":
            return stage.kind == "matvec" and len(parts) == 1 and self._only_sampled(node)
        if not self._is_rowwise(node):
            return False
        if node.op == "rope":
            return stage.kind == "matvec" and len(parts) == 1 and len(parts[0].linears) == 1 and "rope" not in ops
        if len(parts) == 1:
            return True
        if not all(part.linears for part in parts):
            return False
        shapes = {self.graph[part.linears[0]].type.shape for part in parts}
        return len(parts) == 2 and sum(len(p.linears) for p in parts) == 2 and len(shapes) == 1 and not set(ops) & set(_BOUND_TO_PART)

    def _at_hand(self, name: str, stage: Draft, pulled: set[str]) -> bool:
        """Whether a worker of ``stage`` can have its own rows of ``name``; collects floating nodes to compute there."""
        if self._is_leaf(name):
            return True
        place = self.of.get(name)
        if place is not None:
            return place.stage < stage.index or (place.stage == stage.index and place.role != "core")
        node = self.graph[name]
        if node.op in LANE_REDUCTIONS:
            operand = self.of.get(node.inputs[0])
            ready = operand is not None and operand.stage < stage.index
        else:
            ready = self._is_rowwise(node) and node.op not in _BOUND_TO_PART
            ready = ready and all(self._at_hand(operand, stage, pulled) for operand in node.inputs)
        if ready:
            pulled.add(name)
        return ready

    def _merged(self, stage: Draft, parts: list[DraftPart]) -> DraftPart:
        """One part for rows that meet: the second part's linears and epilogue join the first's."""
        first, *others = sorted(parts, key=stage.parts.index)
        for other in others:
            stage.parts.remove(other)
            for name in other.made(stage):
                self.of[name] = Place(stage.index, "rows", first)
            first.linears += other.linears
            first.epilogue += other.epilogue
        return first

    # ── questions ──

    def _is_leaf(self, name: str) -> bool:
        return self.graph[name].op in LEAF_OPS

    def _floats(self, name: str) -> bool:
        return not self._is_leaf(name) and name not in self.of

    def _is_rowwise(self, node: Node) -> bool:
        return op_row(node.op).role == "rowwise" or self._is_position_row(node)

    def _is_position_row(self, node: Node) -> bool:
        return node.op == "embed" and self.graph[node.inputs[0]].op == "position"

    def _made_by_rows(self, name: str) -> bool:
        return name in self.of and self.of[name].role == "rows"

    def _only_sampled(self, node: Node) -> bool:
        """Whether only row-wise ops lie between ``node`` and the sampling: then its order in memory is all that counts."""
        return all(
            user.op == "sample" or (op_row(user.op).role == "rowwise" and len(user.inputs) == 1 and self._only_sampled(user))
            for user in self.graph.users(node.name)
        )

    def _unsupported(self, node: Node, why: str, culprit: str | None = None) -> GraphError:
        source = where(self.graph[culprit]) if culprit else ""
        return GraphError(f"{node.name} ({node.op}) is not supported yet: {why}{source or where(node)}")
