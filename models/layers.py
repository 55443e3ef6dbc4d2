"""Parts the reference models share: RMSNorm, RoPE tables, attention over a KV cache."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kogc.models.config import RopeScaling


def widen(x: Tensor) -> Tensor:
    """`x` in at least fp32: half types are widened, fp32 and fp64 are returned as they are."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def rms_normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) · weight over the last axis, computed in at least fp32, returned in the type of `x`."""
    wide = widen(x)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale * widen(weight)).to(x.dtype)


class RMSNorm(nn.Module):
    """RMS normalisation over the last axis with one learned scale, `weight` [D]."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] → [..., D]."""
        return rms_normalize(x, self.weight, self.eps)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians per position of each rotated pair: fp64 [head_dim / 2], always on the CPU."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    frequency = theta**-exponent
    if scaling is None:
        return frequency
    # Full turns within the original context decide: many turns keep the frequency, few stretch it.
    turns = frequency * scaling.original_context / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return frequency * (keep + (1 - keep) / scaling.factor)


class RopeTable(nn.Module):
    """Cosine and sine of every position's RoPE angles, as the non-persistent buffers `cos` and `sin`.

    Both are [capacity, head_dim / 2], or [capacity, head_dim / 2, 2] = (cos, sin) in one buffer `pair` when `paired`.
    The tables hold real values always: on the CPU when the rest of the module is on meta. They are rounded from fp64
    to fp32 and stay fp32 when the module becomes half precision; in a `.double()` module they are fp64.
    """

    def __init__(self, frequencies: Tensor, capacity: int, paired: bool):
        super().__init__()
        self._frequencies = frequencies
        self._capacity = capacity
        self._paired = paired
        self._fill(torch.float32, torch.device("cpu"))

    def _fill(self, dtype: torch.dtype, device: torch.device) -> None:
        positions = torch.arange(self._capacity, dtype=torch.float64, device="cpu")
        angles = positions[:, None] * self._frequencies
        tables = {"cos": angles.cos(), "sin": angles.sin()}
        if self._paired:
            tables = {"pair": torch.stack(list(tables.values()), dim=-1)}
        for name, table in tables.items():
            self.register_buffer(name, table.to(device, dtype), persistent=False)

    def _apply(self, fn, recurse=True):
        """Follow `.to()` and friends by making the tables anew, so that no conversion narrows or empties them."""
        target = fn(next(self.buffers()))
        dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
        self._fill(dtype, torch.device("cpu") if target.is_meta else target.device)
        return self

    def at(self, position: Tensor) -> tuple[Tensor, ...]:
        """The rows for `position` [T], one tensor per table: (cos, sin), or (pair,)."""
        return tuple(_rows(table, position) for table in self.buffers())


def _rows(table: Tensor, position: Tensor) -> Tensor:
    """`table[position]`, also for a meta `position`: then by way of the CPU, where the values are."""
    if position.device == table.device:
        return table[position]
    return table[position.to(table.device)].to(position.device)


class KVCache(nn.Module):
    """Keys and values of all positions so far: non-persistent buffers `k` and `v`, each [KV, capacity, head_dim].

    They follow the module's dtype. Zero at first, so that slots not yet written are finite under the mask.
    """

    def __init__(self, kv_heads: int, capacity: int, head_dim: int):
        super().__init__()
        for name in ("k", "v"):
            self.register_buffer(name, torch.zeros(kv_heads, capacity, head_dim), persistent=False)

    def _apply(self, fn, recurse=True):
        """Follow `.to()` and friends; leaving meta gives uninitialised memory, which is zeroed."""
        was_meta = self.k.is_meta
        super()._apply(fn, recurse)
        if was_meta and not self.k.is_meta:
            self.k.zero_()
            self.v.zero_()
        return self

    def append(self, keys: Tensor, values: Tensor, position: Tensor) -> None:
        """Write `keys` and `values` [T, KV, head_dim] at the slots `position` [T], in place."""
        self.k.index_copy_(1, position, keys.transpose(0, 1))
        self.v.index_copy_(1, position, values.transpose(0, 1))

    def attend(self, query: Tensor, mask: Tensor) -> Tensor:
        """Scaled-dot-product attention of `query` [T, H, head_dim] over the cache → [T, H · head_dim].

        `mask` is bool [T, capacity], true where visible. Query head h reads key/value head h · KV // H. PyTorch's
        attention keeps its softmax in fp32 for half types.
        """
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            self.k[None],
            self.v[None],
            attn_mask=mask,
            enable_gqa=query.shape[1] != self.k.shape[0],
        )
        return out[0].transpose(0, 1).flatten(1)


def visible(position: Tensor, capacity: int, window: int | None = None) -> Tensor:
    """Which cache slots each query may read: bool [T, capacity], causal, or 0 ≤ age < `window`."""
    age = position[:, None] - torch.arange(capacity, device=position.device)
    return age >= 0 if window is None else (age >= 0) & (age < window)
