"""PyTorch's speed on the same module: compiled as a whole and replayed as a CUDA graph, one token a replay.

The module decodes the last position of caches that are exactly as long as the context, so that it needs no mask and PyTorch
takes its fastest attention.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from unittest.mock import patch

import torch
import torch.nn.functional as F
from kogc.models import laneformer
from kogc.models.layers import KVCache
from torch import Tensor, nn

REPLAYS, ROUNDS = 40, 3


class FullCache(KVCache):
    """A cache all of whose positions are visible."""

    def attend(self, query: Tensor, mask: Tensor) -> Tensor:
        """As ``KVCache.attend``, without the mask."""
        out = F.scaled_dot_product_attention(query.transpose(0, 1)[None], self.k[None], self.v[None], enable_gqa=query.shape[1] != self.k.shape[0])
        return out[0].transpose(0, 1).flatten(1)


def real_pairs(x: Tensor, turn: Tensor) -> Tensor:
    """As ``laneformer.rotate_pairs``, without the complex numbers that torch.compile makes no code for."""
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = turn[:, None].unbind(-1)
    return torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2).to(x.dtype)


def as_peer(module: nn.Module, dtype: torch.dtype, context: int) -> nn.Module:
    """``module`` itself, narrowed to ``dtype``, its caches ``context`` positions long and filled with noise."""
    module.to(dtype)
    windowed = getattr(module.config, "sliding_window", None)
    for part in module.modules():
        if isinstance(part, KVCache):
            part.k, part.v = (torch.randn(old.shape[0], context, old.shape[2], dtype=dtype, device=old.device) for old in (part.k, part.v))
            if windowed is None or windowed >= context:
                part.__class__ = FullCache
    module.capacity = context
    return module


@torch.no_grad()
def token_us(module: nn.Module, context: int, compiled: bool) -> float:
    """µs a token of ``as_peer``'s module at its last position, the median of some rounds."""
    step = torch.compile(module, fullgraph=True, dynamic=False) if compiled else module
    device = next(module.parameters()).device
    token, position = torch.zeros(1, dtype=torch.int64, device=device), torch.full((1,), context - 1, device=device)

    def once() -> None:
        token.copy_(step(token, position).argmax(-1))

    with patch.object(laneformer, "rotate_pairs", real_pairs):
        rounds = _graph_rounds(once) if device.type == "cuda" else _plain_rounds(once)
    return statistics.median(rounds)


def _graph_rounds(once: Callable[[], None]) -> list[float]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # compiles, and lets libraries choose their kernels
            once()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    graph.replay()
    return [_timed_replays(graph) for _ in range(ROUNDS)]


def _timed_replays(graph: torch.cuda.CUDAGraph) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(REPLAYS):
        graph.replay()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) * 1e3 / REPLAYS


def _plain_rounds(once: Callable[[], None]) -> list[float]:
    once()
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        once()
        rounds.append((time.perf_counter() - began) * 1e6)
    return rounds
