"""Cut: a model without lanes as one with a lane for every rank.

Every lane keeps a copy of the residual stream. A matrix that reads the stream is cut by its rows (queries, keys and values by
heads, gate and up by features, the head by words), so that a lane makes a part of the values; a matrix that reads such parts is
cut by its columns, and what the lanes make are parts of a sum, which goes back onto every lane's stream. (Shoeybi et al.,
Megatron-LM, 2019, section 3.) The result is a Laneformer whose sums block; nothing behind this pass knows the difference.
"""

from __future__ import annotations

from collections.abc import Callable

from kogc.ir.graph import Graph, Node, where
from kogc.ir.ops import op_row
from kogc.ir.passes.cut_heads import heads_made_by, reaches_output
from kogc.ir.passes.fuse_names import Unique
from kogc.ir.shards import shard_leaf
from kogc.ir.types import TensorType

#: How a value of the uncut model [T, F] is there: ``whole`` as it was; ``same`` [T, lanes, F], equal in every lane; ``cut``
#: [T, lanes, F / lanes], a part in each; ``part`` [T, lanes, F], of which the sum over lanes is meant.
WHOLE, SAME, CUT, PART = "whole", "same", "cut", "part"


class Undivided(Exception):
    """Something that another number of lanes would divide: says what."""


class Uncuttable(Exception):
    """An op that no number of lanes can cut: says which."""


def cut(graph: Graph, lanes: int) -> Graph:
    """``graph``, which has no lanes, with ``lanes`` of them.

    Raises Undivided for heads or features that do not divide, Uncuttable for an op that needs whole vectors of what is cut.
    """
    return _Cutter(graph, lanes).run()


class _Cutter:
    def __init__(self, graph: Graph, lanes: int) -> None:
        self.old, self.lanes, self.new = graph, lanes, graph.like()
        self.unique = Unique(node.name for node in graph)
        self.form: dict[str, str] = {}
        #: Name in the old graph and form → name in the new one.
        self.made: dict[tuple[str, str], str] = {}
        self.shards: dict[tuple, str] = {}
        #: Ops that belong to the embedding.
        self.embedding: set[str] = set()

    def run(self) -> Graph:
        for node in self.old:
            rule: Callable[[Node], None] | None = getattr(self, f"_{node.op}", None)
            if rule is None:
                raise Uncuttable(f"{node.name} ({node.op}){where(node)}")
            rule(node)
        self.new.outputs = tuple(self._output(name) for name in self.old.outputs)
        self.new.effects = tuple(self.made[name, self.form[name]] for name in self.old.effects)
        return self.new.without_dead_nodes()

    # ── leaves ──

    def _leaf(self, node: Node) -> None:
        self._keep(node, WHOLE, node)

    _token = _position = _table = _weight = _leaf

    def _cache(self, node: Node) -> None:
        """A lane holds its own heads; those that several lanes need, each of them holds."""
        heads, capacity, head_dim = node.type.shape
        self._keep(node, CUT, node.with_(type=TensorType((heads * self._copies(heads), capacity, head_dim), node.type.dtype)))

    def _copies(self, kv_heads: int) -> int:
        if kv_heads % self.lanes and self.lanes % kv_heads:
            raise Undivided(f"the {kv_heads} key/value heads of {self.old.name}")
        return max(1, self.lanes // kv_heads)

    # ── matrices ──

    def _embed(self, node: Node) -> None:
        self._op(node, WHOLE, node.inputs)
        self._spread(node)

    def _spread(self, node: Node) -> None:
        """Put the embedding, once it is complete, onto every lane: there the stream begins."""
        users = self.old.users(node.name)
        if len(users) == 1 and op_row(users[0].op).role == "rowwise" and len(users[0].inputs) == 1:
            self.embedding.add(users[0].name)
        else:
            self.form[node.name] = SAME
            self._as_same(node.name, WHOLE)

    def _linear(self, node: Node) -> None:
        x, weight, *bias = node.inputs
        rows = node.attrs.get("rows") or (0, self.old[weight].type.shape[0])
        if self.form[x] == CUT:
            self._by_columns(node, rows)
        elif reaches_output(self.old, node.name) and (rows[1] - rows[0]) % self.lanes:
            # Words that do not divide: workers of all ranks take units of the head, and read the stream of no lane in particular.
            mean = self._put("lane_mean", node, (self._as(x, SAME),))
            self._op(node, WHOLE, (mean, *(self.made[name, WHOLE] for name in (weight, *bias))))
        else:
            self._by_rows(node, rows)

    def _by_rows(self, node: Node, rows: tuple[int, int]) -> None:
        x, weight, *bias = node.inputs
        copies = self._row_copies(node, rows[1] - rows[0])
        weights = [self._shard(weight, "rows", rows, copies), *(self._shard(b, "rows", (0, rows[1] - rows[0]), copies) for b in bias)]
        self._keep(node, CUT, self._made(node, (self._as(x, SAME), *weights), {}))

    def _by_columns(self, node: Node, rows: tuple[int, int]) -> None:
        x, weight, *bias = node.inputs
        weights = [self._shard(weight, "columns", rows), *(self._shard(b, "once", (0, rows[1] - rows[0])) for b in bias)]
        self._keep(node, PART, self._made(node, (self.made[x, CUT], *weights), {}))

    def _row_copies(self, node: Node, rows: int) -> int:
        """In how many lanes each row of ``node`` is needed. Raises Undivided when they do not divide."""
        made = heads_made_by(self.old, node.name)
        if made and made.stored:
            return self._copies(made.heads)
        what, count = (f"the {made.heads} heads of {self.old.name}", made.heads) if made else (f"the {rows} rows of {node.inputs[1]}", rows)
        if count % self.lanes:
            raise Undivided(what)
        return 1

    def _shard(self, leaf: str, cut: str, part: tuple[int, int], copies: int = 1) -> str:
        key = (leaf, cut, part, copies)
        if key not in self.shards:
            shard = shard_leaf(self.old[leaf], self.unique(f"{leaf}_{cut}"), cut, self.lanes, part, copies)
            self.shards[key] = self.new.add(shard).name
        return self.shards[key]

    # ── attention ──

    def _rope(self, node: Node) -> None:
        self._op(node, CUT, node.inputs)

    def _kv_append(self, node: Node) -> None:
        self._op(node, CUT, node.inputs)

    def _attention(self, node: Node) -> None:
        heads = node.attrs["kv_heads"]
        self._op(node, CUT, node.inputs, kv_heads=heads * self._copies(heads))

    # ── the rest ──

    def _norm(self, node: Node) -> None:
        self._op(node, SAME if self.form[node.inputs[0]] == SAME else WHOLE, node.inputs)

    _rms_norm = _layer_norm = _norm

    def _rowwise(self, node: Node) -> None:
        """Values of one form keep it, parts only where the op distributes over sums; what meets the stream is on every lane."""
        forms = {self.form[name] for name in node.inputs}
        kept = len(forms) == 1 and (PART not in forms or node.op in ("add", "scale"))
        self._op(node, forms.pop() if kept else SAME if SAME in forms else WHOLE, node.inputs)
        if node.name in self.embedding:
            self._spread(node)

    _add = _mul = _scale = _activation = _gated_activation = _softcap = _rowwise

    # ── making nodes ──

    def _op(self, node: Node, form: str, inputs: tuple[str, ...], **attrs) -> None:
        names = tuple(self._as(name, form) if name in self.form else name for name in inputs)
        self._keep(node, form, self._made(node, names, {**node.attrs, **attrs}))

    def _made(self, node: Node, inputs: tuple[str, ...], attrs: dict) -> Node:
        try:
            kind = op_row(node.op).shape(tuple(self.new[name].type for name in inputs), attrs)
        except ValueError as error:  # operands cut in two ways
            raise Uncuttable(f"{node.name} ({node.op}; {error}){where(node)}") from None
        return node.with_(inputs=inputs, attrs=attrs, type=kind)

    def _keep(self, node: Node, form: str, made: Node) -> None:
        self.form[node.name] = form
        self.made[node.name, form] = self.new.add(made).name

    def _as(self, name: str, form: str) -> str:
        """The value ``name`` of the old graph in the form wanted; leaves have one form only."""
        have = self.form[name]
        if self.old[name].op in ("token", "position", "table", "weight"):
            form = WHOLE
        if (name, form) in self.made:
            return self.made[name, form]
        if form == SAME:
            return self._as_same(name, have)
        if form != WHOLE:
            raise Uncuttable(f"{name} ({self.old[name].op}){where(self.old[name])}")
        op = {PART: "lane_sum", CUT: "lane_concat", SAME: "lane_mean"}[have]
        self.made[name, form] = self._put(op, self.old[name], (self.made[name, have],))
        if self.new[self.made[name, form]].type.shape != self.old[name].type.shape:  # heads of which lanes hold copies
            raise Uncuttable(f"{name} ({self.old[name].op}){where(self.old[name])}")
        return self.made[name, form]

    def _as_same(self, name: str, have: str) -> str:
        whole = self.made[name, WHOLE] if have == WHOLE else self._as(name, WHOLE)
        self.made[name, SAME] = self._put("lane_broadcast", self.old[name], (whole,), lanes=self.lanes)
        return self.made[name, SAME]

    def _put(self, op: str, node: Node, inputs: tuple[str, ...], **attrs) -> str:
        made = Node(self.unique(f"{node.name}_{op}"), op, inputs, node.type, attrs, node.source, node.module)
        return self.new.add(self._made(made, inputs, attrs)).name

    def _output(self, name: str) -> str:
        return self._as(name, WHOLE)
