"""Buffers of a rolled program: which values share one, what each is called, and the number of every write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from kogc.ir.graph import Graph
from kogc.ir.passes.fuse_names import Unique
from kogc.ir.passes.roll_segments import Span
from kogc.ir.passes.roll_stage import PROLOGUE, StageDraft
from kogc.ir.program import Affine, Buffer, Operand, Output, Stage


@dataclass(frozen=True)
class Site:
    """A place in a loop body where a value is written: in prologue (part −1), part or core of body stage ``stage``."""

    stage: int
    part: int
    local: str
    kind: str


@dataclass(frozen=True)
class Body:
    """A span and what its iterations write: at each site one value per iteration, read by somebody or not."""

    span: Span
    sites: tuple[Site, ...]
    written: tuple[tuple[str, ...], ...]  # [site][iteration]


def loop_body(drafts: Sequence[StageDraft], span: Span) -> Body:
    """A value leaves a loop's stage if it leaves it in any iteration, so that all iterations make the same writes."""
    sites: list[Site] = []
    written: list[tuple[str, ...]] = []
    for number in range(span.period):
        turns = [drafts[span.first + number + span.period * i] for i in range(span.count)]
        for site in _sites(number, turns):
            sites.append(site)
            written.append(tuple(_value(draft, site) for draft in turns))
    return Body(span, tuple(sites), tuple(written))


def stage_outputs(stage: Stage) -> Iterator[tuple[int, Output]]:
    """(part, output) in write order: prologue outputs, parts, attention."""
    yield from ((PROLOGUE, output) for output in stage.prologue_outputs)
    for index, part in enumerate(stage.parts):
        yield from ((index, output) for output in part.outputs)
    if stage.attention:
        yield 0, stage.attention.output


def _sites(number: int, turns: Sequence[StageDraft]) -> list[Site]:
    found = {
        Site(number, part, output.value, output.kind): None for draft in turns for part, output in stage_outputs(draft.stage)
    }
    order = _local_order(turns[0].stage)
    return sorted(found, key=lambda site: (site.part, order.get((site.part, site.local), -1), site.kind))


def _local_order(stage: Stage) -> dict[tuple[int, str], int]:
    """Where a local name is computed within its part; dots come first and are not listed."""
    parts = {PROLOGUE: stage.prologue} | {index: part.epilogue for index, part in enumerate(stage.parts)}
    return {(part, spec.name): index for part, specs in parts.items() for index, spec in enumerate(specs)}


def _value(draft: StageDraft, site: Site) -> str:
    """The graph value ``draft`` makes at ``site``."""
    for part, output in stage_outputs(draft.stage):
        if (part, output.value, output.kind) == (site.part, site.local, site.kind):
            return output.buffer
    return draft.values[site.part, site.local]


class Classes:
    """Union-find over values."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}

    def find(self, value: str) -> str:
        root = value
        while self._parent.get(root, root) != root:
            root = self._parent[root]
        while self._parent.get(value, value) != root:
            self._parent[value], value = root, self._parent[value]
        return root

    def join(self, values: Iterable[str]) -> None:
        first, *others = values
        for other in others:
            self._parent[self.find(other)] = self.find(first)


class BufferPlan:
    """Buffers for one choice of spans.

    Values that a loop reads or writes in one place are one buffer (a carried value is written by the previous iteration,
    or before the loop). ``unaffine`` is where a loop reads write numbers that are no affine function of the iteration:
    (index of the span, iteration to cut it at), or None.
    """

    def __init__(self, graph: Graph, drafts: Sequence[StageDraft], spans: Sequence[Span]) -> None:
        self.graph = graph
        self.drafts = drafts
        self.bodies = [loop_body(drafts, span) for span in spans]
        self._written = {value for body in self.bodies for turn in body.written for value in turn}
        self.classes = Classes()
        self._join_loops()
        self.names = self._name_classes()
        self.number, self.writes = self._number_writes()
        self.unaffine = self._first_unaffine()

    # ── classes ──

    def _join_loops(self) -> None:
        for body in self.bodies:
            for values in body.written:
                self.classes.join(values)
            for values in self._reads(body).values():
                self.classes.join(values)

    def _reads(self, body: Body) -> dict[tuple[int, int], list[str]]:
        """(body stage, operand) → the value it reads in each iteration."""
        span = body.span
        return {
            (number, index): [
                self.drafts[span.first + number + span.period * i].stage.operands[index].buffer for i in range(span.count)
            ]
            for number in range(span.period)
            for index in range(len(self.drafts[span.first + number].stage.operands))
        }

    def _name_classes(self) -> dict[str, str]:
        """Class → buffer name. Classes that want one name and hold the same kind of value share the buffer."""
        wishes: dict[str, str] = {}
        carried = {self.classes.find(value) for value in self._carried()}
        for body in self.bodies:
            for site, values in zip(body.sites, body.written, strict=True):
                draft = self.drafts[body.span.first + site.stage]
                root = self.classes.find(values[0])
                wishes.setdefault(root, "x" if root in carried else self._wish(draft, site, values[0]))
        unique, shared, names = Unique(), {}, {}
        for root, wish in wishes.items():
            key = (wish, self._form(root))
            if key not in shared:
                shared[key] = unique(wish)
            names[root] = shared[key]
        return names

    def _carried(self) -> Iterator[str]:
        """The residual stream: embeddings and sums that a stage of another layer reads."""
        made = {output.buffer: draft.group for draft in self.drafts for _, output in stage_outputs(draft.stage)}
        for draft in self.drafts:
            for value in (operand.buffer for operand in draft.stage.operands):
                stream = made[value].kind == "embed" or self.graph[value].op == "add"
                if stream and made[value].layer != draft.group.layer:
                    yield value

    def _wish(self, draft: StageDraft, site: Site, value: str) -> str:
        if site.kind == "logits":
            return "best"
        if site.kind == "cache":
            return "kv_keys" if self._is_attended(value, 1) else "kv_values"
        if draft.stage.attention:
            return "partials"
        if self._is_attended(value, 0):
            return "q"
        op = self.graph[value].op
        if op in ("activation", "gated_activation", "mul"):
            return "act"
        if op == "add":
            return f"x_{draft.group.block}" if draft.group.block else "x_sum"
        if site.part == PROLOGUE:
            return site.local
        name = draft.stage.parts[site.part].name
        return name.removesuffix("_proj")

    def _is_attended(self, value: str, slot: int) -> bool:
        """Whether ``value`` is operand ``slot`` (query, keys, values) of an attention."""
        return any(user.op == "attention_partial" and user.inputs[slot] == value for user in self.graph.users(value))

    def _form(self, value: str) -> tuple:
        return self._payload(value), self.graph[value].type.shape[1:]

    def _payload(self, value: str) -> str:
        op = self.graph[value].op
        return {"kv_append": "cache", "attention_partial": "partials"}.get(op, "vector")

    # ── numbers ──

    def buffer_of(self, value: str) -> str:
        return self.names[self.classes.find(value)]

    def _number_writes(self) -> tuple[dict[str, int], dict[str, int]]:
        """(value → its write number, buffer → writes per step)."""
        number: dict[str, int] = {}
        writes = dict.fromkeys(self.names.values(), 0)
        for body in self.bodies:
            for iteration in range(body.span.count):
                for values in body.written:
                    name = self.buffer_of(values[iteration])
                    number[values[iteration]] = writes[name]
                    writes[name] += 1
        return number, writes

    def _first_unaffine(self) -> tuple[int, int] | None:
        for index, body in enumerate(self.bodies):
            for values in self._reads(body).values():
                numbers = [self.number[value] for value in values]
                if (at := _break(numbers)) is not None:
                    # Often only the first iteration differs; then the rest stays one loop.
                    return index, 1 if _break(numbers[1:]) is None else at
        return None

    # ── what stages refer to ──

    def read(self, values: Sequence[str]) -> tuple[str, Affine]:
        """Buffer and write number of an operand that reads ``values`` in the iterations of a loop."""
        numbers = [self.number[value] for value in values]
        return self.buffer_of(values[0]), Affine(numbers[0], numbers[1] - numbers[0] if len(numbers) > 1 else 0)

    def outputs(self, body: Body, stage: int, part: int) -> tuple[Output, ...]:
        """What body stage ``stage`` writes in ``part``, with a cache per iteration where it appends."""
        found = []
        for site, values in zip(body.sites, body.written, strict=True):
            if (site.stage, site.part) == (stage, part):
                buffer, write = self.read(values)
                found.append(Output(site.local, site.kind, buffer, write, self._caches(body, site)))
        return tuple(found)

    def _caches(self, body: Body, site: Site) -> tuple[str, ...]:
        if site.kind != "cache":
            return ()
        turns = (self.drafts[body.span.first + site.stage + body.span.period * i].stage for i in range(body.span.count))
        return tuple(
            output.caches[0]
            for stage in turns
            for part, output in stage_outputs(stage)
            if (part, output.value, output.kind) == (site.part, site.local, "cache")
        )


def _break(numbers: Sequence[int]) -> int | None:
    """First index from which ``numbers`` no longer grow by one constant, or None."""
    steps = [b - a for a, b in zip(numbers, numbers[1:])]
    return next((index + 1 for index, step in enumerate(steps) if step != steps[0]), None)


# ── sizes ──


def make_buffers(stages: Iterable[tuple[int, Stage]], forms: dict[str, Buffer]) -> tuple[Buffer, ...]:
    """``forms`` with scope and a first number of slots, from the reads of all stage instances (iteration, stage)."""
    far: dict[str, int] = dict.fromkeys(forms, 1)
    local = {name: form.lanes > 1 for name, form in forms.items()}
    made = dict.fromkeys(forms, 0)
    for iteration, stage in stages:
        for _, output in stage_outputs(stage):
            made[output.buffer] += 1
            local[output.buffer] &= stage.lanes == forms[output.buffer].lanes
        for operand in stage.operands:
            far[operand.buffer] = max(far[operand.buffer], made[operand.buffer] - operand.write.at(iteration))
            local[operand.buffer] &= _stays_in_lane(operand, stage)
    # Two more than the longest way back: the write under way, and one for workers that run behind.
    return tuple(
        replace(form, slots=far[name] + 2, writes_per_step=made[name], scope="group" if local[name] else "grid")
        for name, form in forms.items()
    )


def _stays_in_lane(operand: Operand, stage: Stage) -> bool:
    return operand.access in ("lane", "rows", "heads", "records", "cache") and stage.lanes == operand.lanes
