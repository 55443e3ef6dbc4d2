"""Features of a value that are used alone: one range of them, or a range of every group (a fused QKV, head by head)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kogc.ir.passes.recognize.errors import NotUnderstood
from kogc.ir.passes.recognize.layout import Atom, Layout
from kogc.ir.passes.recognize.values import Space


@dataclass(frozen=True)
class Pick:
    """Features ``first + i · step + j`` for i < ``count`` and j < ``size``, in this order."""

    first: int
    size: int
    step: int = 0
    count: int = 1

    @property
    def width(self) -> int:
        return self.size * self.count

    @property
    def is_range(self) -> bool:
        return self.count == 1

    @property
    def last(self) -> int:
        """One past the last feature."""
        return self.first + (self.count - 1) * self.step + self.size

    def after(self, start: int) -> Pick:
        """The same features, counted in something that begins ``start`` features earlier."""
        return Pick(self.first + start, self.size, self.step, self.count)

    def indices(self) -> np.ndarray:
        """int64 [width]."""
        return (self.first + self.step * np.arange(self.count)[:, None] + np.arange(self.size)).reshape(-1)

    def of(self, layout: Layout, whole: Space) -> Layout:
        """``layout``, which takes these features of ``whole``, over a space that has no others."""
        to = Space(whole.tokens, whole.lanes, self.width)
        if self.is_range:
            return whole.moved(layout, to, self.first)
        dims = tuple(tuple(part for atom in dim for part in self._closer(atom, whole)) for dim in layout.dims)
        near = Layout((), layout.offset - self.first).with_dims(dims)
        return Space(whole.tokens, whole.lanes, whole.features).moved(near, to)

    def _closer(self, atom: Atom, whole: Space) -> Iterable[Atom]:
        if not atom.stride:
            return [atom]
        return [
            Atom(part.stride // self.step * self.size, part.size) if axis == "F" and part.stride >= self.step else part
            for axis, part in whole.by_axis(atom)
        ]


def picked(atoms: Iterable[Atom], first: int, features: int) -> Pick:
    """What ``atoms`` over ``features`` features take, beginning with feature ``first``. Raises NotUnderstood for anything but a ``Pick``."""
    size, step, count = 1, 0, 1
    for stride, length in sorted(atoms):
        if not step and stride == size:
            size *= length
        elif not step and stride > size:
            step, count = stride, length
        elif step and stride == step * count:
            count *= length
        else:
            raise NotUnderstood("the features used here are no range, and no range of every group, of a linear layer's outputs")
    pick = Pick(first, size, step, count)
    if pick.last > features:
        raise NotUnderstood("the features used here lie across the end of a linear layer's outputs")
    return pick
