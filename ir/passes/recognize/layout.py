"""The axis algebra: what ``view``, ``permute``, ``expand`` and slicing do, as data instead of as graph nodes.

A value of the model lives in one canonical array (row-major). A *layout* says which element of that array every element
of a tensor is. A dimension is a row of *atoms* (stride, size), outermost first, strides counted in elements of the
canonical array; stride 0 is a broadcast. Splitting and merging dimensions cuts and joins atoms, so a chain of
view-like ops, however long, leaves nothing but one layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import numpy as np


class LayoutError(ValueError):
    """A rearrangement that the algebra cannot express."""


class Atom(NamedTuple):
    """``size`` elements, ``stride`` apart."""

    stride: int
    size: int


Dim = tuple[Atom, ...]


def joined(atoms: Iterable[Atom]) -> Dim:
    """The same index sequence in the fewest atoms: sizes of 1 vanish, neighbours that continue each other merge."""
    row: list[Atom] = []
    for atom in atoms:
        if atom.size == 1:
            continue
        if row and row[-1].stride == atom.stride * atom.size:
            row[-1] = Atom(atom.stride, row[-1].size * atom.size)
        else:
            row.append(Atom(*atom))
    return tuple(row)


def length(atoms: Iterable[Atom]) -> int:
    return prod(atom.size for atom in atoms)


def cut(atoms: Dim, inner: int) -> tuple[Dim, Dim]:
    """Split ``atoms`` into an outer part and an inner part of ``inner`` elements. Raises LayoutError when none exists."""
    rest = list(atoms)
    taken: list[Atom] = []
    missing = inner
    while missing > 1:
        if not rest:
            raise LayoutError(f"a dimension of {length(atoms)} does not split into parts of {inner}")
        stride, size = rest.pop()
        if missing % size == 0:
            taken.insert(0, Atom(stride, size))
            missing //= size
        elif size % missing == 0:
            taken.insert(0, Atom(stride, missing))
            rest.append(Atom(stride * missing, size // missing))
            missing = 1
        else:
            raise LayoutError(f"a dimension of {length(atoms)} does not split into parts of {inner}")
    return tuple(rest), tuple(taken)


def paired(first: Dim, second: Dim) -> list[tuple[Atom, Atom]]:
    """Both dimensions cut at the same places, outermost first. A dimension of size 1 is broadcast to the other."""
    if not first and second:
        first = (Atom(0, length(second)),)
    if not second and first:
        second = (Atom(0, length(first)),)
    if length(first) != length(second):
        raise LayoutError(f"dimensions of {length(first)} and {length(second)} do not go together")
    pairs: list[tuple[Atom, Atom]] = []
    while first:
        size = min(first[-1].size, second[-1].size)
        first, (one,) = cut(first, size)
        second, (other,) = cut(second, size)
        pairs.insert(0, (one, other))
    return pairs


def aligned(one: Layout, other: Layout) -> list[list[tuple[Atom, Atom]]]:
    """The dimensions of two layouts that broadcast together, lined up from the right and cut alike."""
    count = max(len(one.dims), len(other.dims))
    first, second = (((),) * (count - len(layout.dims)) + layout.dims for layout in (one, other))
    return [paired(a, b) for a, b in zip(first, second, strict=True)]


def gaps(atoms: Iterable[Atom], total: int) -> Dim | None:
    """What ``atoms`` leave out of a canonical array of ``total`` elements, or None when they overlap or stick out."""
    missing: list[Atom] = []
    reached = 1
    for stride, size in sorted(atom for atom in atoms if atom.stride and atom.size > 1):
        if stride % reached:
            return None
        if stride != reached:
            missing.append(Atom(reached, stride // reached))
        reached = stride * size
    if total % reached:
        return None
    if reached != total:
        missing.append(Atom(reached, total // reached))
    return tuple(missing)


@dataclass(frozen=True)
class Layout:
    """Dimensions of a tensor over a canonical array; element 0 is at ``offset``."""

    dims: tuple[Dim, ...]
    offset: int = 0

    @staticmethod
    def contiguous(shape: Sequence[int]) -> Layout:
        """The canonical array of that shape itself."""
        dims: list[Dim] = []
        stride = 1
        for size in reversed(shape):
            dims.insert(0, joined([Atom(stride, size)]))
            stride *= size
        return Layout(tuple(dims))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(length(dim) for dim in self.dims)

    @property
    def atoms(self) -> Dim:
        """All atoms, outermost dimension first."""
        return tuple(atom for dim in self.dims for atom in dim)

    def with_dims(self, dims: Iterable[Iterable[Atom]]) -> Layout:
        """Other dimensions, from any row of atoms each."""
        return replace(self, dims=tuple(joined(dim) for dim in dims))

    def reshaped(self, shape: Sequence[int]) -> Layout:
        """Same elements in row-major order, other dimensions."""
        if prod(shape) != prod(self.shape):
            raise LayoutError(f"{list(self.shape)} cannot become {list(shape)}")
        rest = joined(self.atoms)
        dims: list[Dim] = []
        for size in reversed(shape):
            rest, dim = cut(rest, size)
            dims.insert(0, dim)
        return self.with_dims(dims)

    def permuted(self, order: Sequence[int]) -> Layout:
        return self.with_dims(self.dims[axis] for axis in order)

    def swapped(self, one: int, other: int) -> Layout:
        order = list(range(len(self.dims)))
        order[one], order[other] = order[other], order[one]
        return self.permuted(order)

    def expanded(self, shape: Sequence[int]) -> Layout:
        """Broadcast to ``shape``: new leading dimensions and dimensions of size 1 are repeated."""
        dims = [()] * (len(shape) - len(self.dims)) + list(self.dims)
        return self.with_dims(
            dim if length(dim) == size else (Atom(0, size),) for dim, size in zip(dims, shape, strict=True)
        )

    def repeated(self, axis: int, times: int, inner: bool) -> Layout:
        """Every element of ``axis`` ``times`` times in a row (``inner``), or the whole axis that many times."""
        dims = list(self.dims)
        dims[axis] = (*dims[axis], Atom(0, times)) if inner else (Atom(0, times), *dims[axis])
        return self.with_dims(dims)

    def sliced(self, axis: int, start: int, count: int, step: int = 1) -> Layout:
        """``count`` elements of ``axis`` from ``start`` on, every ``step``-th."""
        dim = self.dims[axis]
        if (start, count, step) == (0, length(dim), 1):
            return self
        dims = list(self.dims)
        if count == 1:
            dims[axis] = ()
            return replace(self.with_dims(dims), offset=self.offset + _at(dim, start))
        # A slice inside of one atom, or of whole runs of the inner atoms.
        for depth in range(len(dim)):
            stride, size = dim[depth]
            inner = length(dim[depth + 1 :])
            if start % inner == 0 and count % inner == 0 and (step == 1 or inner == 1):
                first, runs = start // inner, count // inner
                outer = _at(dim[:depth], first // size) if depth else 0
                if first % size + (runs - 1) * step < size and first // size == (first + (runs - 1) * step) // size:
                    dims[axis] = (Atom(stride * step, runs), *dim[depth + 1 :])
                    return replace(self.with_dims(dims), offset=self.offset + outer + first % size * stride)
        raise LayoutError(f"a slice of {count} from {start} (step {step}) of a dimension of {length(dim)}")

    def indices(self) -> np.ndarray:
        """The canonical index of every element, int64 of the layout's shape."""
        result = np.full((), self.offset, np.int64)
        for dim in self.dims:
            result = result[..., None] + _dim_indices(dim)
        return result


def _at(dim: Dim, index: int) -> int:
    """Canonical distance of element ``index`` of a dimension from its element 0."""
    distance = 0
    for stride, size in reversed(dim):
        index, digit = divmod(index, size)
        distance += digit * stride
    return distance


def _dim_indices(dim: Dim) -> np.ndarray:
    result = np.zeros(1, np.int64)
    for stride, size in dim:
        result = (result[:, None] + stride * np.arange(size)).reshape(-1)
    return result


def layout_of(indices: np.ndarray) -> Layout | None:
    """The layout that has these canonical indices, or None when there is none."""
    offset = int(indices.reshape(-1)[0])
    dims = []
    for axis in range(indices.ndim):
        line = indices[tuple(slice(None) if a == axis else 0 for a in range(indices.ndim))]
        dims.append(_atoms_of(line.astype(np.int64) - offset))
    if any(dim is None for dim in dims):
        return None
    layout = Layout(tuple(joined(dim) for dim in dims), offset)
    return layout if np.array_equal(layout.indices(), indices) else None


def _atoms_of(line: np.ndarray) -> Dim | None:
    """Atoms whose indices are ``line`` (which begins with 0)."""
    if len(line) == 1:
        return ()
    stride = int(line[1])
    if stride < 0:
        return None
    run = 1
    while run < len(line) and line[run] == run * stride:
        run += 1
    while len(line) % run:
        run -= 1
    if run == 1:
        return None
    outer = _atoms_of(line[::run] - line[0])
    return None if outer is None else (*outer, Atom(stride, run))
