"""Rotary embeddings, recognised by what they compute.

A pending value is a linear function of one activation. It is probed with numbers: at position 0 nothing turns, which
shows where every feature went; at other positions it must be a rotation of pairs of features of each head, in one of the
two known pairings, the same for all heads. How the model spells that (complex product, rotate-half, stack and flatten, …)
makes no difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kogc.ir.ops.decode import rope_pairs
from kogc.ir.passes.recognize.angles import Angles
from kogc.ir.passes.recognize.context import Context
from kogc.ir.passes.recognize.errors import NotUnderstood
from kogc.ir.passes.recognize.layout import Layout, layout_of
from kogc.ir.passes.recognize.pending import Function
from kogc.ir.passes.recognize.picks import Pick
from kogc.ir.passes.recognize.values import Act, Pending, Space

STYLES = ("interleaved", "half")
#: Relative agreement of a rotation with its probe, in fp64.
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Rotation:
    """What a pending value is: the features ``pick`` of the base through ``layout``, rotated unless ``style`` is None."""

    pick: Pick
    space: Space
    layout: Layout
    style: str | None = None
    head_dim: int = 0
    rotary_dim: int = 0
    cos: str = ""
    sin: str = ""


def resolved(context: Context, value: Pending) -> Act:
    """The activation that ``value`` is: a rope op, or a view of the base. Raises NotUnderstood when it is neither."""
    function = Function(context, value)
    rotation = context.rotations.get(function.key)
    if rotation is None:
        rotation = context.rotations[function.key] = _examine(context, function)
    node = context.builder.narrowed(value.base, rotation.pick)
    if rotation.style is None:
        return context.seen(node, rotation.space, rotation.layout)
    attrs = {"style": rotation.style, "head_dim": rotation.head_dim, "rotary_dim": rotation.rotary_dim}
    inputs = (node, rotation.cos, rotation.sin, context.leaf("position"))
    return context.act("rope", inputs, attrs, rotation.space, rotation.layout, function.origin)


def _examine(context: Context, function: Function) -> Rotation:
    wide = function.space
    placed = _placement(function)
    pick = context.features(placed, wide)
    space = Space(wide.tokens, wide.lanes, pick.width)
    layout = pick.of(placed, wide)
    probe = _Probe(function, wide, space, pick, layout)
    turned = _turned_features(context, probe)
    if not turned.any():
        return Rotation(pick, space, layout)
    for head_dim in _head_sizes(function, layout, space):
        rotary_dim = _rotary_dim(turned, head_dim)
        for style in STYLES if rotary_dim else ():
            angles = Angles(context, probe, head_dim, rope_pairs(style, head_dim, rotary_dim)[: rotary_dim // 2])
            if angles.explain(TOLERANCE):
                cos, sin = (context.table(f"rope.{name}", table) for name, table in angles.tables())
                return Rotation(pick, space, layout, style, head_dim, rotary_dim, cos, sin)
    raise NotUnderstood(
        "an activation is combined with functions of the position in a way that is no rotary embedding "
        "(pairs of features of each head turned by the position's angles, interleaved or by halves)"
    )


def _placement(function: Function) -> Layout:
    """Where the base's features are in the value, seen at position 0, where nothing turns."""
    still = function.coefficients_at(np.zeros(function.space.tokens, np.int64))
    ones = function(np.ones(function.space.shape), still)
    counted = function(np.arange(1.0, function.space.total + 1), still)
    if np.iscomplexobj(ones) or not np.all(np.abs(ones) > 0):
        raise NotUnderstood("an activation is combined with functions of the position that do not leave it as it is at position 0")
    places = counted / ones - 1
    indices = np.rint(places).astype(np.int64)
    layout = layout_of(indices) if np.allclose(places, indices, rtol=0, atol=1e-4) else None
    if layout is None:
        raise NotUnderstood("parts of an activation are put together in an order that is no view of it")
    return layout


class _Probe:
    """The pending value in canonical order: from features [T, row] of its pick to the same features."""

    def __init__(self, function: Function, wide: Space, space: Space, pick: Pick, layout: Layout) -> None:
        self.function = function
        self.space = space
        self._base = np.zeros((wide.tokens, wide.lanes or 1, wide.features))
        self._features = pick.indices()
        self._order = layout.indices().reshape(-1)

    def __call__(self, features: np.ndarray, coefficients: dict[str, np.ndarray]) -> np.ndarray:
        self._base[..., self._features] = features.reshape(*self._base.shape[:2], -1)
        value = self.function(self._base, coefficients)
        canonical = np.empty(self.space.total, value.dtype)
        canonical[self._order] = value.reshape(-1)
        return canonical.reshape(self.space.tokens, self.space.row)


def _turned_features(context: Context, probe: _Probe) -> np.ndarray:
    """Bool [row]: the features that do not just pass through at some late position."""
    rng = np.random.default_rng(0)
    features = rng.uniform(1, 2, (probe.space.tokens, probe.space.row))
    late = context.capacity - 1 - np.arange(probe.space.tokens) % context.capacity
    return (probe(features, probe.function.coefficients_at(late)) != features).any(0)


def _head_sizes(function: Function, layout: Layout, space: Space) -> list[int]:
    """Candidates for the head size, likeliest first: the dimensions that the model itself gave its tensors."""
    shown = [dim[-1].size for dim in layout.dims if dim and dim[-1].stride == 1]
    entries = [dim[-1] for act in function.entries.values() for dim in act.layout.dims if dim]
    shown += [atom.size * times for atom in entries if atom.stride in (1, 2) for times in (atom.stride, 2)]
    shown += range(2, space.features + 1)
    return [size for size in dict.fromkeys(shown) if size % 2 == 0 and space.features % size == 0]


def _rotary_dim(turned: np.ndarray, head_dim: int) -> int:
    """The even number of leading features of each head that turn."""
    last = int(turned.reshape(-1, head_dim).any(0).nonzero()[0][-1])
    return last + 1 + (last + 1) % 2
