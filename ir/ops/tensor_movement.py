"""ATen ops that make, move and select values without computing on them, as numpy functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray


def _same(x: Array, *_: Any, **__: Any) -> Array:
    return x


# ── shape ──


def _view(x: Array, shape: Sequence[int]) -> Array:
    return x.reshape(shape)


def _flatten(x: Array, start_dim: int = 0, end_dim: int = -1) -> Array:
    if x.ndim == 0:
        return x.reshape(1)
    start, end = start_dim % x.ndim, end_dim % x.ndim
    return x.reshape(*x.shape[:start], -1, *x.shape[end + 1 :])


def _unflatten(x: Array, dim: int, sizes: Sequence[int]) -> Array:
    dim %= x.ndim
    sizes = list(sizes)
    if -1 in sizes:
        sizes[sizes.index(-1)] = x.shape[dim] // -int(np.prod(sizes))
    return x.reshape(*x.shape[:dim], *sizes, *x.shape[dim + 1 :])


def _squeeze(x: Array, dim: int | Sequence[int] | None = None) -> Array:
    if dim is None:
        return x.squeeze()
    dims = (dim,) if isinstance(dim, int) else dim
    return x.squeeze(tuple(d for d in dims if x.shape[d] == 1))


def _permute(x: Array, dims: Sequence[int]) -> Array:
    return x.transpose(dims)


def _t(x: Array) -> Array:
    return x if x.ndim < 2 else x.swapaxes(0, 1)


def _expand(x: Array, size: Sequence[int], implicit: bool = False) -> Array:
    old = (1,) * (len(size) - x.ndim) + x.shape
    return np.broadcast_to(x, tuple(have if want == -1 else want for want, have in zip(size, old, strict=True)))


def _repeat(x: Array, repeats: Sequence[int]) -> Array:
    return np.tile(x, repeats)


def _repeat_interleave(x: Array, repeats: Any, dim: int | None = None, output_size: int | None = None) -> Array:
    return np.repeat(x, repeats, axis=dim)


# ── selecting ──


def _axis(ndim: int, dim: int, index: Any) -> tuple:
    """An index tuple that applies ``index`` to axis ``dim``."""
    return (slice(None),) * (dim % ndim) + (index,)


def _slice(x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Array:
    return x[_axis(x.ndim, dim, slice(start, end, step))]


def _select(x: Array, dim: int, index: int) -> Array:
    return x[_axis(x.ndim, dim, index)]


def _narrow(x: Array, dim: int, start: int, length: int) -> Array:
    start = int(start) % x.shape[dim] if start < 0 else int(start)
    return x[_axis(x.ndim, dim, slice(start, start + length))]


def _index(x: Array, indices: Sequence[Array | None]) -> Array:
    return x[_places(indices)]


def _places(indices: Sequence[Array | None]) -> tuple:
    return tuple(slice(None) if index is None else index for index in indices)


def _index_select(x: Array, dim: int, index: Array) -> Array:
    return np.take(x, index, axis=dim)


def _gather(x: Array, dim: int, index: Array, sparse_grad: bool = False) -> Array:
    dim %= x.ndim
    inside = tuple(slice(None) if axis == dim else slice(size) for axis, size in enumerate(index.shape))
    return np.take_along_axis(x[inside], index, axis=dim)


def _embedding(weight: Array, indices: Array, padding_idx: int = -1, *_: Any) -> Array:
    return weight[indices]


# ── joining and parting ──


def _cat(tensors: Sequence[Array], dim: int = 0) -> Array:
    return np.concatenate(tensors, axis=dim)


def _stack(tensors: Sequence[Array], dim: int = 0) -> Array:
    return np.stack(tensors, axis=dim)


def _split(x: Array, size: int | Sequence[int], dim: int = 0) -> tuple[Array, ...]:
    length = x.shape[dim]
    sizes = [min(size, length - at) for at in range(0, length, size)] if isinstance(size, int) else list(size)
    ends = np.cumsum(sizes).tolist()
    return tuple(_slice(x, dim, end - part, end) for part, end in zip(sizes, ends, strict=True))


def _chunk(x: Array, chunks: int, dim: int = 0) -> tuple[Array, ...]:
    return _split(x, max(1, -(-x.shape[dim] // chunks)), dim)


def _unbind(x: Array, dim: int = 0) -> tuple[Array, ...]:
    return tuple(_select(x, dim, index) for index in range(x.shape[dim]))


def _getitem(values: tuple[Array, ...], index: int) -> Array:
    return values[index]


# ── writing, as new values ──


def _index_copy(x: Array, dim: int, index: Array, source: Array) -> Array:
    after = x.copy()
    after[_axis(x.ndim, dim, index)] = source
    return after


def _index_put(x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False) -> Array:
    after = x.copy()
    if accumulate:
        np.add.at(after, _places(indices), values)
    else:
        after[_places(indices)] = values
    return after


def _copy(x: Array, src: Array, non_blocking: bool = False) -> Array:
    return np.broadcast_to(src, x.shape)


def _slice_scatter(x: Array, src: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Array:
    after = x.copy()
    after[_axis(x.ndim, dim, slice(start, end, step))] = src
    return after


def _select_scatter(x: Array, src: Array, dim: int, index: int) -> Array:
    after = x.copy()
    after[_axis(x.ndim, dim, index)] = src
    return after


def _scatter(x: Array, dim: int, index: Array, src: Any) -> Array:
    after = x.copy()
    np.put_along_axis(after, index, src[tuple(map(slice, index.shape))] if np.ndim(src) else src, axis=dim)
    return after


# ── making ──


def _arange(*bounds: float, **_: Any) -> Array:
    return np.arange(*bounds)


def _full(size: Sequence[int], fill_value: Any, **_: Any) -> Array:
    return np.full(size, fill_value)


def _new_full(x: Array, size: Sequence[int], fill_value: Any, **_: Any) -> Array:
    return np.full(size, fill_value)


def _filled(value: float) -> Callable[..., Array]:
    return lambda size, **_: np.full(size, value)


def _new_filled(value: float) -> Callable[..., Array]:
    return lambda x, size, **_: np.full(size, value)


def _filled_like(value: float) -> Callable[..., Array]:
    return lambda x, **_: np.full(x.shape, value)


def _full_like(x: Array, fill_value: Any, **_: Any) -> Array:
    return np.full(x.shape, fill_value)


def _scalar_tensor(value: Any, **_: Any) -> Array:
    return np.asarray(value)


def _triangle(function: Callable) -> Callable[..., Array]:
    return lambda x, diagonal=0: function(x, diagonal)


MOVEMENT: dict[str, Callable] = {
    # The value itself: casts are done by the recorded type.
    **{f"aten.{name}": _same for name in "to contiguous clone alias detach dropout lift_fresh_copy".split()},
    **{f"aten.{name}": _view for name in "view reshape _unsafe_view".split()},
    "aten.view_as": lambda x, other: x.reshape(other.shape),
    "aten.reshape_as": lambda x, other: x.reshape(other.shape),
    "aten.flatten": _flatten,
    "aten.unflatten": _unflatten,
    "aten.squeeze": _squeeze,
    "aten.unsqueeze": lambda x, dim: np.expand_dims(x, dim),
    "aten.transpose": lambda x, dim0, dim1: x.swapaxes(dim0, dim1),
    "aten.swapaxes": lambda x, axis0, axis1: x.swapaxes(axis0, axis1),
    "aten.swapdims": lambda x, dim0, dim1: x.swapaxes(dim0, dim1),
    "aten.movedim": lambda x, source, destination: np.moveaxis(x, source, destination),
    "aten.permute": _permute,
    "aten.t": _t,
    "aten.numpy_T": lambda x: x.transpose(),
    "aten.mT": lambda x: x.swapaxes(-1, -2),
    "aten.expand": _expand,
    "aten.expand_as": lambda x, other: np.broadcast_to(x, other.shape),
    "aten.repeat": _repeat,
    "aten.tile": lambda x, dims: np.tile(x, dims),
    "aten.repeat_interleave": _repeat_interleave,
    "aten.flip": lambda x, dims: np.flip(x, dims),
    "aten.roll": lambda x, shifts, dims=(): np.roll(x, shifts, dims or None),
    "aten.slice": _slice,
    "aten.select": _select,
    "aten.narrow": _narrow,
    "aten.index": _index,
    "aten.index_select": _index_select,
    "aten.gather": _gather,
    "aten.embedding": _embedding,
    "aten.cat": _cat,
    "aten.concat": _cat,
    "aten.stack": _stack,
    "aten.split": _split,
    "aten.split.sizes": _split,
    "aten.split_with_sizes": _split,
    "aten.chunk": _chunk,
    "aten.unbind": _unbind,
    "getitem": _getitem,
    "aten.index_copy": _index_copy,
    "aten.index_put": _index_put,
    "aten.copy": _copy,
    "aten.slice_scatter": _slice_scatter,
    "aten.select_scatter": _select_scatter,
    "aten.scatter": _scatter,
    "aten.fill": lambda x, value: np.full(x.shape, value),
    "aten.zero": _filled_like(0),
    "aten.arange": _arange,
    "aten.zeros": _filled(0),
    "aten.ones": _filled(1),
    "aten.empty": _filled(0),  # any value will do, zero is repeatable
    "aten.full": _full,
    "aten.zeros_like": _filled_like(0),
    "aten.ones_like": _filled_like(1),
    "aten.empty_like": _filled_like(0),
    "aten.full_like": _full_like,
    "aten.new_zeros": _new_filled(0),
    "aten.new_ones": _new_filled(1),
    "aten.new_empty": _new_filled(0),
    "aten.new_full": _new_full,
    "aten.scalar_tensor": _scalar_tensor,
    "aten.tril": _triangle(np.tril),
    "aten.triu": _triangle(np.triu),
}
