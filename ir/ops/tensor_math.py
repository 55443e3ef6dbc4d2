"""ATen ops that compute, as numpy functions with ATen's parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kogc.ir.ops.activations import ACTIVATIONS

Array = np.ndarray


# ── matrix products ──


def _linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    y = x @ weight.T
    return y if bias is None else y + bias


def _einsum(equation: str, tensors: Sequence[Array], path: Any = None) -> Array:
    return np.einsum(equation.replace(" ", ""), *tensors, optimize=True)


def _addmm(bias: Array, a: Array, b: Array, beta: float = 1, alpha: float = 1) -> Array:
    return beta * bias + alpha * (a @ b)


def _attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Array:
    """scaled_dot_product_attention. A row that sees nothing gives zeros, as in PyTorch."""
    if enable_gqa:
        key, value = (np.repeat(x, query.shape[-3] // x.shape[-3], axis=-3) for x in (key, value))
    scores = query @ key.swapaxes(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    if attn_mask is not None:
        scores = np.where(attn_mask, scores, -np.inf) if attn_mask.dtype == bool else scores + attn_mask
    sees = (scores > -np.inf).any(axis=-1, keepdims=True)
    return np.where(sees, _softmax(np.where(sees, scores, 0.0), -1), 0.0) @ value


# ── pointwise ──


def _add(a: Any, b: Any, alpha: float = 1) -> Array:
    return a | b if _both_bool(a, b) else a + (b if alpha == 1 else alpha * b)


def _sub(a: Any, b: Any, alpha: float = 1) -> Array:
    return a - (b if alpha == 1 else alpha * b)


def _both_bool(a: Any, b: Any) -> bool:
    return np.asarray(a).dtype == np.asarray(b).dtype == bool


def _div(a: Any, b: Any, rounding_mode: str | None = None) -> Array:
    if rounding_mode == "floor":
        return np.floor_divide(a, b)
    quotient = np.true_divide(a, b)
    return np.trunc(quotient) if rounding_mode == "trunc" else quotient


def _pow(x: Any, exponent: Any) -> Array:
    if isinstance(exponent, float) and exponent.is_integer():
        exponent = int(exponent)  # numpy multiplies for whole powers, as PyTorch does
    if isinstance(exponent, int) and exponent < 0:
        return 1.0 / np.power(x, -exponent)
    return np.power(x, exponent)


def _clamp(x: Array, min: Any = None, max: Any = None) -> Array:
    return x if min is None and max is None else np.clip(x, min, max)


def _masked_fill(x: Array, mask: Array, value: Any) -> Array:
    return np.where(mask, value, x)


def _where(condition: Array, a: Any, b: Any) -> Array:
    return np.where(condition, a, b)


def _gelu(x: Array, approximate: str = "none") -> Array:
    return ACTIVATIONS["gelu_tanh" if approximate == "tanh" else "gelu"](x)


def _softplus(x: Array, beta: float = 1, threshold: float = 20) -> Array:
    return np.where(x * beta > threshold, x, np.logaddexp(0.0, x * beta) / beta)


def _glu(x: Array, dim: int = -1) -> Array:
    value, gate = np.split(x, 2, axis=dim)
    return value * ACTIVATIONS["sigmoid"](gate)


def _view_as_complex(x: Array) -> Array:
    return x[..., 0] + 1j * x[..., 1]


def _view_as_real(x: Array) -> Array:
    return np.stack([x.real, x.imag], axis=-1)


# ── along axes ──


def _axes(dim: int | Sequence[int] | None) -> int | tuple[int, ...] | None:
    """ATen's ``dim``: an empty list means all axes."""
    return (tuple(dim) or None) if isinstance(dim, tuple | list) else dim


def _reduction(function: Callable) -> Callable[..., Array]:
    return lambda x, dim=None, keepdim=False, **_: function(x, axis=_axes(dim), keepdims=keepdim)


def _best(values: Callable, place: Callable) -> Callable[..., tuple[Array, Array]]:
    return lambda x, dim, keepdim=False: (values(x, axis=dim, keepdims=keepdim), place(x, axis=dim, keepdims=keepdim))


def _variance(x: Array, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None) -> Array:
    if isinstance(dim, bool):  # aten.var(x, unbiased)
        dim, unbiased = None, dim
    lost = float(unbiased) if correction is None else correction
    return np.var(x, axis=_axes(dim), ddof=lost, keepdims=keepdim)


def _cumsum(x: Array, dim: int, **_: Any) -> Array:
    return np.cumsum(x, axis=dim)


def _softmax(x: Array, dim: int, *_: Any, **__: Any) -> Array:
    weights = np.exp(x - x.max(axis=dim, keepdims=True))
    return weights / weights.sum(axis=dim, keepdims=True)


def _log_softmax(x: Array, dim: int, *_: Any, **__: Any) -> Array:
    centred = x - x.max(axis=dim, keepdims=True)
    return centred - np.log(np.exp(centred).sum(axis=dim, keepdims=True))


def _rms_norm(x: Array, normalized_shape: Sequence[int], weight: Array | None, eps: float) -> Array:
    axes = tuple(range(-len(normalized_shape), 0))
    y = x / np.sqrt(np.mean(x * x, axis=axes, keepdims=True) + eps)
    return y if weight is None else y * weight


def _layer_norm(
    x: Array,
    normalized_shape: Sequence[int],
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Array:
    axes = tuple(range(-len(normalized_shape), 0))
    centred = x - x.mean(axis=axes, keepdims=True)
    y = centred / np.sqrt(np.mean(centred * centred, axis=axes, keepdims=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


MATH: dict[str, Callable] = {
    "aten.linear": _linear,
    "aten.einsum": _einsum,
    "aten.addmm": _addmm,
    "aten.baddbmm": _addmm,
    **{f"aten.{name}": lambda a, b: a @ b for name in "matmul mm bmm mv dot".split()},
    "aten.outer": lambda a, b: np.multiply.outer(a, b),
    "aten.scaled_dot_product_attention": _attention,
    "aten.add": _add,
    "aten.sub": _sub,
    "aten.rsub": lambda a, b, alpha=1: _sub(b, a, alpha),
    "aten.subtract": _sub,
    "aten.mul": lambda a, b: a * b,
    "aten.multiply": lambda a, b: a * b,
    **{f"aten.{name}": _div for name in "div divide true_divide".split()},
    "aten.floor_divide": lambda a, b: np.floor_divide(a, b),
    "aten.remainder": lambda a, b: np.remainder(a, b),
    "aten.pow": _pow,
    "aten.square": lambda x: x * x,
    "aten.rsqrt": lambda x: 1.0 / np.sqrt(x),
    "aten.reciprocal": lambda x: 1.0 / x,
    "aten.neg": lambda x: -x,
    **{f"aten.{name}": getattr(np, name) for name in "sqrt exp exp2 log log2 log1p tanh sin cos floor ceil trunc sign isnan isinf".split()},
    "aten.abs": lambda x: np.abs(x),
    "aten.round": lambda x: np.rint(x),
    "aten.sigmoid": ACTIVATIONS["sigmoid"],
    "aten.silu": ACTIVATIONS["silu"],
    "aten.relu": ACTIVATIONS["relu"],
    "aten.gelu": _gelu,
    "aten.softplus": _softplus,
    "aten.glu": _glu,
    "aten.erf": np.vectorize(math.erf, otypes=[np.float64]),
    "aten.maximum": lambda a, b: np.maximum(a, b),
    "aten.minimum": lambda a, b: np.minimum(a, b),
    "aten.clamp": _clamp,
    "aten.clip": _clamp,
    "aten.clamp_min": lambda x, min: np.maximum(x, min),
    "aten.clamp_max": lambda x, max: np.minimum(x, max),
    "aten.where": _where,
    "aten.masked_fill": _masked_fill,
    **{f"aten.logical_{name}": getattr(np, f"logical_{name}") for name in "and or xor not".split()},
    **{f"aten.bitwise_{name}": getattr(np, f"bitwise_{name}") for name in "and or xor not".split()},
    **{f"aten.__{name}__": getattr(np, f"bitwise_{name}") for name in "and or xor".split()},
    "aten.eq": lambda a, b: a == b,
    "aten.ne": lambda a, b: a != b,
    "aten.lt": lambda a, b: a < b,
    "aten.le": lambda a, b: a <= b,
    "aten.gt": lambda a, b: a > b,
    "aten.ge": lambda a, b: a >= b,
    "aten.polar": lambda abs, angle: abs * np.cos(angle) + 1j * (abs * np.sin(angle)),
    "aten.complex": lambda real, imag: real + 1j * imag,
    "aten.real": lambda x: x.real,
    "aten.imag": lambda x: x.imag,
    "aten.conj": np.conj,
    "aten.view_as_complex": _view_as_complex,
    "aten.view_as_real": _view_as_real,
    "aten.sum": _reduction(np.sum),
    "aten.mean": _reduction(np.mean),
    "aten.amax": _reduction(np.max),
    "aten.amin": _reduction(np.min),
    "aten.prod": _reduction(np.prod),
    "aten.any": _reduction(np.any),
    "aten.all": _reduction(np.all),
    "aten.argmax": _reduction(np.argmax),
    "aten.var": _variance,
    "aten.max": lambda x, other=None: np.max(x) if other is None else np.maximum(x, other),
    "aten.min": lambda x, other=None: np.min(x) if other is None else np.minimum(x, other),
    "aten.max.dim": _best(np.max, np.argmax),
    "aten.min.dim": _best(np.min, np.argmin),
    "aten.cumsum": _cumsum,
    "aten.softmax": _softmax,
    "aten._softmax": _softmax,
    "aten.log_softmax": _log_softmax,
    "aten._log_softmax": _log_softmax,
    "aten.rms_norm": _rms_norm,
    "aten.layer_norm": _layer_norm,
}
