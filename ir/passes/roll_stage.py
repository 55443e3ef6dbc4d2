"""One stage of one layer as a ``Stage`` of the program, before layers are rolled: its buffers are still named after the
graph values they carry, and every per-iteration table has one entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from kogc.ir.graph import LEAF_OPS, Graph, Node
from kogc.ir.interpret import cache_key
from kogc.ir.passes.fuse import weight_key
from kogc.ir.passes.fuse_names import Namer, Unique
from kogc.ir.passes.fuse_place import LANE_REDUCTIONS
from kogc.ir.passes.roll_names import const_name, op_name
from kogc.ir.passes.roll_scope import prologue_scopes
from kogc.ir.program import Affine, Attention, Const, Matrix, Operand, OpSpec, Output, Part, Stage
from kogc.ir.stages import PartGroup, StageGroup
from kogc.ir.types import TensorType

#: Number of the "part" that prologue values belong to in ``StageDraft.values``.
PROLOGUE = -1
#: What a part's epilogue calls the value it starts from: dots of a matvec, the table row of an embedding.
ROW = "row"
_HERE = Affine(0)


@dataclass(frozen=True)
class StageDraft:
    """``stage`` with graph values for buffers. ``values`` tells which value a local name of a part stands for."""

    group: StageGroup
    stage: Stage
    values: Mapping[tuple[int, str], str]

    @cached_property
    def signature(self) -> str:
        """The stage without what may differ between iterations of a loop: keys, windows, names, where values come from
        and which values leave (a loop publishes what any of its iterations publishes). Equal text is equal structure."""
        s = self.stage
        fixed = replace(
            s,
            name="",
            title="",
            operands=tuple(replace(o, buffer="") for o in s.operands),
            consts=tuple(replace(c, keys=()) for c in s.consts),
            prologue_outputs=(),
            parts=tuple(self._part_signature(part) for part in s.parts),
            attention=s.attention and replace(s.attention, caches=(), windows=(), output=replace(s.attention.output, buffer="")),
            embed_table=s.embed_table and "",
        )
        return repr(fixed)

    @staticmethod
    def _part_signature(part: Part) -> Part:
        fixed = tuple(replace(o, buffer="", caches=()) for o in part.outputs if o.kind != "buffer")
        return replace(part, name="", matrices=tuple(replace(m, keys=()) for m in part.matrices), outputs=fixed)


def draft_stage(graph: Graph, group: StageGroup, namer: Namer) -> StageDraft:
    """The program stage of one ``StageGroup``."""
    return _Drafter(graph, group, namer).draft()


def lanes_of(kind: TensorType) -> int:
    """The lane axis of a value [T, lanes, features]; 1 without."""
    return int(kind.shape[1]) if len(kind.shape) == 3 else 1


class _Drafter:
    def __init__(self, graph: Graph, group: StageGroup, namer: Namer) -> None:
        self.graph = graph
        self.group = group
        self.namer = namer
        self.unique = Unique()
        self.local: dict[str, str] = {}  # graph value made in this stage → its name here
        self.lanes: dict[str, int] = {}  # name here → lanes
        self.values: dict[tuple[int, str], str] = {}
        self.operands: dict[tuple[str, str], Operand] = {}  # by (graph value, access)
        self.consts: dict[str, Const] = {}

    def draft(self) -> StageDraft:
        make = {"embed": self._embed, "matvec": self._matvec, "rows": self._rows, "attention": self._attention, "sample": self._sample}
        stage = make[self.group.kind]()
        stage = replace(stage, operands=tuple(self.operands.values()), consts=tuple(self.consts.values()))
        return StageDraft(self.group, stage, self.values)

    # ── kinds ──

    def _stage(self, lanes: int, **more) -> Stage:
        return Stage(self.group.name, self.group.title, self.group.kind, lanes, **more)

    def _embed(self) -> Stage:
        core = self.graph[self.group.core]
        width = int(core.type.shape[-1])
        (part,) = self.group.parts
        self._name(0, core.name, ROW, 1)
        built = self._part(0, part, self.group.name, (), (), width)
        return self._stage(1, parts=(built,), embed_table=weight_key(self.graph, core.name), embed_width=width)

    def _matvec(self) -> Stage:
        lanes = lanes_of(self.graph[self.group.parts[0].linears[0]].type)
        prologue = self._prologue(lanes)
        vector = self.local.get(self.group.vector) or self._whole(self.group.vector, lanes, "own")
        published = tuple(Output(self.local[n], "buffer", n, _HERE) for n in self.group.prologue_outputs)
        names = Unique()
        parts = tuple(self._matvec_part(index, part, names) for index, part in enumerate(self.group.parts))
        width = int(self.graph[self.group.vector].type.shape[-1])
        return self._stage(
            lanes, prologue=prologue, prologue_outputs=published, vector=vector, vector_width=width, parts=parts
        )  # fmt: skip

    def _rows(self) -> Stage:
        lanes = lanes_of(self._row_kind(self.group.parts[0]))
        prologue = self._prologue(lanes)
        published = tuple(Output(self.local[n], "buffer", n, _HERE) for n in self.group.prologue_outputs)
        names = Unique()
        parts = []
        for index, part in enumerate(self.group.parts):
            for name in part.outputs:
                if name in self.group.prologue:
                    self.values[index, self.local[name]] = name
            width = int(self._row_kind(part).shape[-1])
            parts.append(replace(self._part(index, part, names(self._rows_name(part)), (), (), width), width=width))
        return self._stage(lanes, prologue=prologue, prologue_outputs=published, parts=tuple(parts))

    def _row_kind(self, part: PartGroup) -> TensorType:
        """The type of the vector whose rows a part without matrices makes."""
        last = self.graph[(*part.epilogue, *part.outputs)[-1]]
        return self.graph[last.inputs[1]].type if last.op == "kv_append" else last.type

    def _rows_name(self, part: PartGroup) -> str:
        """What attention calls the rows."""
        slots = {user.inputs.index(name) for name in part.outputs for user in self.graph.users(name) if user.op == "attention_partial"}
        return ("queries", "keys", "values")[min(slots)] if slots else self.group.name

    def _attention(self) -> Stage:
        core = self.graph[self.group.core]
        q, keys, values, _ = core.inputs
        lanes, attrs = lanes_of(core.type), core.attrs
        name = self._operand(q, "heads", lanes, int(self.graph[q].type.shape[-1])).name
        for cache in (keys, values):
            kind = self.graph[self.graph[cache].inputs[1]].type
            self._operand(cache, "cache", lanes, kind.elements_per_token // lanes)
        attention = Attention(
            name, attrs["heads"] // lanes, attrs["kv_heads"] // lanes, attrs["head_dim"], attrs["scale"],
            attrs.get("softcap") or 0.0, attrs["splits"], ((cache_key(self.graph, keys), cache_key(self.graph, values)),),
            (attrs.get("window") or 0,), Output("partials", "buffer", core.name, _HERE),
        )  # fmt: skip
        return self._stage(lanes, attention=attention)

    def _sample(self) -> Stage:
        self._operand(self.graph[self.group.core].inputs[0], "best", 1, 1)
        return self._stage(1)

    # ── prologue ──

    def _prologue(self, stage_lanes: int) -> tuple[OpSpec, ...]:
        scopes = prologue_scopes(self.graph, self.group, stage_lanes)
        specs = []
        for name in self.group.prologue:
            node = self.graph[name]
            if node.op == "lane_broadcast" and not self._kept(name):
                # Whoever reads a value without lanes reads the same one in every lane.
                self.local[name] = self._prologue_input(node, 0, stage_lanes, scopes)
                continue
            inputs = tuple(self._prologue_input(node, slot, stage_lanes, scopes) for slot in range(len(node.inputs)))
            lanes, width = lanes_of(node.type), int(node.type.shape[-1])
            local = self._name(PROLOGUE, name, self.unique(op_name(node.op)), lanes)
            gathers = lanes == 1 and node.op in (*LANE_REDUCTIONS, "lane_concat")
            scope = "all" if gathers or (lanes > 1 and scopes[name] == "all") else "own"
            specs.append(OpSpec(local, node.op, inputs, _attrs(node), lanes, width, scope))
        return tuple(specs)

    def _kept(self, name: str) -> bool:
        return name == self.group.vector or name in self.group.prologue_outputs

    def _prologue_input(self, node: Node, slot: int, lanes: int, scopes: Mapping[str, str]) -> str:
        name = node.inputs[slot]
        return self._leaf(node, slot) or self.local.get(name) or self._whole(name, lanes, scopes[name])

    def _whole(self, name: str, stage_lanes: int, scope: str) -> str:
        kind = self.graph[name].type
        lanes = lanes_of(kind)
        access = "all_lanes" if lanes > 1 and (scope == "all" or stage_lanes == 1) else "lane"
        return self._operand(name, access, lanes, int(kind.shape[-1])).name

    # ── parts ──

    def _matvec_part(self, index: int, part: PartGroup, names: Unique) -> Part:
        matrices, biases = [], []
        for number, name in enumerate(part.linears):
            node = self.graph[name]
            matrices.append(self._matrix(node))
            local = self._name(index, name, f"dot{number}", matrices[-1].lanes)
            if len(node.inputs) > 2:
                bias = self._const(node, 2)
                biased = self._name(index, name, self.unique("biased"), matrices[-1].lanes)
                biases.append(OpSpec(biased, "add", (local, bias), {}, matrices[-1].lanes, matrices[-1].rows))
        keys = [weight_key(self.graph, name) for name in part.linears]
        title = names(self.namer.part(keys) if len(self.group.parts) > 1 else self.group.name)
        return self._part(index, part, title, tuple(matrices), tuple(biases), matrices[0].rows)

    def _matrix(self, linear: Node) -> Matrix:
        kind = self.graph[linear.inputs[1]].type
        first, last = linear.attrs.get("rows") or (0, kind.shape[-2])
        lanes = kind.shape[0] if len(kind.shape) == 3 else 1
        return Matrix((weight_key(self.graph, linear.name),), lanes, last - first, kind.shape[-1], first)

    def _part(self, index: int, part: PartGroup, name: str, matrices: tuple, before: tuple[OpSpec, ...], rows: int) -> Part:
        specs, rope = list(before), None
        for node in (self.graph[n] for n in part.epilogue):
            if node.op == "kv_append":
                continue
            if self._is_alias(node, part):
                self.local[node.name] = self._rows_input(node, 0)
                continue
            inputs = tuple(self._rows_input(node, slot) for slot in range(len(node.inputs)))
            local = self._name(index, node.name, self.unique(op_name(node.op)), self._result_lanes(node, inputs))
            specs.append(OpSpec(local, node.op, inputs, _attrs(node), self.lanes[local], rows))
            rope = _attrs(node) if node.op == "rope" else rope
        unit = "rope" if rope else "gated" if len(matrices) == 2 else "row"
        outputs = tuple(self._output(n) for n in part.outputs)
        return Part(name, unit, matrices, tuple(specs), outputs, rope)

    def _is_alias(self, node: Node, part: PartGroup) -> bool:
        """Ops that move nothing when rows are computed one by one: side-by-side lanes are consecutive in memory, and a value
        without lanes is the same for every lane. An embedding is spread for real: its one row goes to every lane."""
        if node.op == "lane_broadcast":
            return self.group.kind == "matvec" and node.name not in part.outputs
        return node.op == "lane_concat"

    def _result_lanes(self, node: Node, inputs: tuple[str, ...]) -> int:
        if node.op == "lane_broadcast":
            return node.attrs["lanes"]
        if node.op in ("lane_sum", "lane_mean"):
            return 1
        return max(self.lanes.get(name, 1) for name in inputs)

    def _rows_input(self, node: Node, slot: int) -> str:
        name = node.inputs[slot]
        local = self._leaf(node, slot) or self.local.get(name)
        if local:
            return local
        kind = self.graph[name].type
        lanes = lanes_of(kind)
        access = "rows_all_lanes" if lanes > 1 and node.op in LANE_REDUCTIONS else "rows"
        return self._operand(name, access, lanes, int(kind.shape[-1])).name

    def _output(self, name: str) -> Output:
        node = self.graph[name]
        if node.op == "kv_append":
            return Output(self.local[node.inputs[1]], "cache", name, _HERE, (cache_key(self.graph, name),))
        sampled = any(user.op == "sample" for user in self.graph.users(name))
        return Output(self.local[name], "logits" if sampled else "buffer", name, _HERE)

    # ── names ──

    def _name(self, part: int, value: str, local: str, lanes: int) -> str:
        self.local[value] = local
        self.lanes[local] = lanes
        self.values[part, local] = value
        return local

    def _leaf(self, node: Node, slot: int) -> str | None:
        """Name of a step input or constant, None for a computed value."""
        leaf = self.graph[node.inputs[slot]]
        if leaf.op in ("token", "position"):
            return leaf.op
        return self._const(node, slot) if leaf.op in LEAF_OPS else None

    def _const(self, node: Node, slot: int) -> str:
        leaf = self.graph[node.inputs[slot]]
        if leaf.name not in self.consts:
            name = self.unique(const_name(node.op, slot))
            shape = tuple(int(d) for d in leaf.type.shape)
            laned = leaf.op == "weight" and len(shape) == 2 and node.op != "embed"
            lanes, own = (shape[0], shape[1:]) if laned else (1, shape)
            self.consts[leaf.name] = Const(name, leaf.op, (leaf.attrs["key"],), lanes, own)
        return self.consts[leaf.name].name

    def _operand(self, value: str, access: str, lanes: int, width: int) -> Operand:
        """The operand for ``value``; its name is provisional until its buffer has one."""
        key = (value, access)
        if key not in self.operands:
            name = f"in{len(self.operands)}"
            self.operands[key] = Operand(name, value, _HERE, access, lanes, width)
            self.lanes[name] = lanes
        return self.operands[key]


def _attrs(node: Node) -> dict:
    attrs = {name: value for name, value in sorted(node.attrs.items()) if value is not None}
    if node.op == "attention_combine":
        attrs["heads"] = int(node.type.shape[-1]) // attrs["head_dim"]  # of one lane
    return attrs
