"""What a tensor of the traced graph *is*, while the graph is read: the symbolic values of the abstract interpretation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kogc.ir.passes.recognize.errors import NotUnderstood
from kogc.ir.passes.recognize.layout import Atom, Dim, Layout, cut


@dataclass(frozen=True)
class Space:
    """The canonical array of an activation: [tokens, features] or [tokens, lanes, features]."""

    tokens: int
    lanes: int | None
    features: int

    @property
    def row(self) -> int:
        """Elements per token."""
        return (self.lanes or 1) * self.features

    @property
    def total(self) -> int:
        return self.tokens * self.row

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.tokens, self.features) if self.lanes is None else (self.tokens, self.lanes, self.features)

    @property
    def token_atom(self) -> Atom:
        return Atom(self.row, self.tokens)

    @property
    def lane_atom(self) -> Atom:
        return Atom(self.features, self.lanes or 1)

    def by_axis(self, atom: Atom) -> list[tuple[str, Atom]]:
        """``atom`` cut where it crosses from features to lanes to tokens, outermost first; axes are ``T``, ``L``, ``F``."""
        parts: list[tuple[str, Atom]] = []
        rest: Dim = (atom,)
        for axis, start, end in (("F", 1, self.features), ("L", self.features, self.row), ("T", self.row, self.total)):
            if not rest or not start <= rest[0].stride < end:
                continue
            size = min(rest[0].size, end // rest[0].stride)
            rest, inner = cut(rest, size)
            parts = [(axis, part) for part in inner] + parts
        return parts if not rest else [("?", atom)]

    def moved(self, layout: Layout, to: Space, shift: int = 0) -> Layout:
        """``layout`` over the same tokens, lanes and features of another space, features counted from ``shift`` on."""
        scale = {"T": (self.row, to.row), "L": (self.features, to.features), "F": (1, 1)}

        def move(atom: Atom) -> list[Atom]:
            if atom.stride == 0:
                return [atom]
            return [Atom(a.stride // scale[axis][0] * scale[axis][1], a.size) for axis, a in self.by_axis(atom)]

        dims = tuple(tuple(part for atom in dim for part in move(atom)) for dim in layout.dims)
        return Layout((), layout.offset - shift).with_dims(dims)


class Value:
    """A symbolic value."""


@dataclass(frozen=True)
class Act(Value):
    """An activation: ``layout`` over the result of the lifted node ``node``."""

    node: str
    space: Space
    layout: Layout


@dataclass(frozen=True)
class Weight(Value):
    """A weight (plus the number ``offset``), seen through ``layout`` over its stored array of ``stored`` shape."""

    leaf: str
    stored: tuple[int, ...]
    layout: Layout
    offset: float = 0.0


@dataclass(frozen=True)
class Token(Value):
    """The token ids, in any shape."""


@dataclass(frozen=True)
class Static(Value):
    """Depends on position, tables and constants alone; ``name`` is its node in the tensor graph."""

    name: str


@dataclass(frozen=True)
class Pending(Value):
    """Linear in the features of the one lifted node ``base``, with coefficients that depend on the position.

    Rotary embeddings look like this until they are complete. ``name`` is the tensor node.
    """

    name: str
    base: str


@dataclass(frozen=True)
class Cache(Value):
    """A KV cache version: ``layout`` over the canonical array [kv_heads, capacity, head_dim] of lifted node ``node``.

    ``slots`` is the leaf's dimension that counts positions. ``factor``: what its elements are multiplied by before queries meet them.
    """

    node: str
    kv_heads: int
    capacity: int
    head_dim: int
    layout: Layout
    slots: int
    factor: float = 1.0

    @property
    def head_stride(self) -> int:
        return self.capacity * self.head_dim


@dataclass(frozen=True)
class Step:
    """One thing done to attention scores: ``scale`` by a factor, ``tanh``, or ``mask`` (window, None for all)."""

    kind: str
    number: float | None = None


@dataclass(frozen=True)
class Scores(Value):
    """Attention scores on their way to probabilities; ``layout`` is over [heads, tokens, capacity]."""

    query: str
    space: Space
    keys: str
    heads: int
    kv_heads: int
    head_dim: int
    capacity: int
    layout: Layout
    steps: tuple[Step, ...] = ()
    normalized: bool = False

    def then(self, kind: str, number: float | None = None) -> Scores:
        """Raises NotUnderstood after the softmax, when nothing more may be done to them."""
        if self.normalized:
            raise NotUnderstood("attention probabilities are changed after the softmax")
        return replace(self, steps=(*self.steps, Step(kind, number)))


@dataclass(frozen=True)
class Unknown(Value):
    """Computed from something that was not understood."""


@dataclass(frozen=True)
class Several(Value):
    """The results of an op that has several."""

    values: tuple[Value, ...] = field(default=())
