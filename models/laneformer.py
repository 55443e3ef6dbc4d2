"""Laneformer as a plain PyTorch module: lanes with full-width residual streams that exchange their outputs late."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kogc.models.config import LaneformerConfig
from kogc.models.layers import KVCache, RMSNorm, RopeTable, rms_normalize, rope_frequencies, visible, widen


def rotate_pairs(x: Tensor, turn: Tensor) -> Tensor:
    """RoPE on neighbouring pairs (x0, x1), (x2, x3), … as a complex product.

    `x` is [T, heads, head_dim], `turn` is (cos, sin) [T, head_dim / 2, 2]; computed in at least fp32.
    """
    pairs = torch.view_as_complex(widen(x).unflatten(-1, (-1, 2)).contiguous())
    turned = pairs * torch.view_as_complex(turn)[:, None]
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


class LaneLinear(nn.Module):
    """One linear map per lane, no bias: `weight` [L, N, K]."""

    def __init__(self, lanes: int, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(lanes, outputs, inputs))
        nn.init.normal_(self.weight, std=inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[T, L, K] → [T, L, N]; lane l sees only its own K values."""
        return torch.einsum("tlk,lnk->tln", x, self.weight)


class LaneRMSNorm(nn.Module):
    """RMS normalisation over the last axis with a scale of its own for each lane, `scale` [L, D]."""

    def __init__(self, lanes: int, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(lanes, size))

    def forward(self, x: Tensor) -> Tensor:
        """[T, L, D] → [T, L, D]."""
        return rms_normalize(x, self.scale, self.eps)


def make_norm(config: LaneformerConfig) -> nn.Module:
    """A norm over every lane's stream: one shared scale, or one per lane."""
    if config.replicated_rmsn_scale:
        return RMSNorm(config.hidden_size, config.norm_eps)
    return LaneRMSNorm(config.num_lanes, config.hidden_size, config.norm_eps)


class Attention(nn.Module):
    """Every lane's share of the heads. Heads are numbered lane by lane, so one KV cache holds all lanes."""

    def __init__(self, config: LaneformerConfig, capacity: int):
        super().__init__()
        lanes, hidden, head = config.num_lanes, config.hidden_size, config.head_dim
        queries = config.num_attention_heads * head // lanes
        keys = config.num_key_value_heads * head // lanes
        self.lanes = lanes
        self.head_dim = head
        self.wq = LaneLinear(lanes, hidden, queries)
        self.wk = LaneLinear(lanes, hidden, keys)
        self.wv = LaneLinear(lanes, hidden, keys)
        self.wo = LaneLinear(lanes, queries, hidden)
        self.cache = KVCache(config.num_key_value_heads, capacity, head)

    def forward(self, x: Tensor, position: Tensor, turn: Tensor, mask: Tensor) -> Tensor:
        """x [T, L, D] → every lane's output [T, L, D]; appends the T positions to the cache first."""
        query, key, value = (
            projection(x).flatten(1).unflatten(1, (-1, self.head_dim)) for projection in (self.wq, self.wk, self.wv)
        )
        self.cache.append(rotate_pairs(key, turn), value, position)
        mixed = self.cache.attend(rotate_pairs(query, turn), mask)
        return self.wo(mixed.unflatten(1, (self.lanes, -1)))


class FeedForward(nn.Module):
    """SwiGLU per lane: w2(silu(w1 x) · w3 x)."""

    def __init__(self, config: LaneformerConfig):
        super().__init__()
        lanes, hidden, inner = config.num_lanes, config.hidden_size, config.intermediate_size // config.num_lanes
        self.w1 = LaneLinear(lanes, hidden, inner)
        self.w3 = LaneLinear(lanes, hidden, inner)
        self.w2 = LaneLinear(lanes, inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[T, L, D] → [T, L, D]."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One layer's parts. `Laneformer.forward` adds their outputs up, since that reaches across layers."""

    def __init__(self, config: LaneformerConfig, capacity: int):
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = Attention(config, capacity)
        self.ffn_norm = make_norm(config)
        self.feed_forward = FeedForward(config)


class Trunk(nn.Module):
    """Everything the released names put under `model.`."""

    def __init__(self, config: LaneformerConfig, capacity: int):
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, capacity) for _ in range(config.num_hidden_layers))
        # Lanes summed before the norm leave one stream, hence one scale.
        self.norm = RMSNorm(config.hidden_size, config.norm_eps) if config.pre_norm_lane_agg else make_norm(config)


class ConcatHead(nn.Module):
    """Head type `lane`: all lanes side by side into one wide matrix, `linear.weight` [V, L · D]."""

    def __init__(self, config: LaneformerConfig):
        super().__init__()
        self.linear = nn.Linear(config.num_lanes * config.hidden_size, config.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normed lanes [T, L, D] → [T, V]."""
        return self.linear(x.flatten(1))


class SlicedHead(LaneLinear):
    """Head type `vocab_parallel`: lane l makes the logits of vocabulary slice l, `weight` [L, V / L, D]."""

    def __init__(self, config: LaneformerConfig):
        super().__init__(config.num_lanes, config.hidden_size, config.vocab_size // config.num_lanes)

    def forward(self, x: Tensor) -> Tensor:
        """Normed lanes [T, L, D] → [T, V]."""
        return super().forward(x).flatten(1)


class LaneSum:
    """Adds the outputs of one kind of sub-block (attention or MLP) to the lanes' streams, layer after layer."""

    def __init__(self, config: LaneformerConfig, communicates: bool):
        self._delay = config.broadcast_delay
        self._early = config.use_early_comm
        self._communicates = communicates
        self._alone = math.sqrt(config.num_lanes)
        self._outputs: list[Tensor] = []

    def add(self, x: Tensor, output: Tensor) -> Tensor:
        """The streams x [T, L, D] after this layer's `output` [T, L, D]; call once per layer, in order.

        Every layer's output is remembered: layers summed early count again for the other lanes `delay` layers later.
        """
        layer = len(self._outputs)
        self._outputs.append(output)
        if layer < self._delay and self._early:
            return x + output.sum(1, keepdim=True)
        if layer < self._delay or not self._communicates:
            return x + self._alone * output
        past = self._outputs[layer - self._delay]
        return x + (output + (past.sum(1, keepdim=True) - past))


class Laneformer(nn.Module):
    """Laneformer for one sequence, decoding `T` positions per call.

    Args:
        config: the model's shape and communication rule.
        capacity: positions the KV caches and RoPE tables hold; `position` must stay below it.

    Tensors are named and shaped as in the released checkpoints, per-lane tensors with the lane axis first. Caches
    ([KV heads of all lanes, capacity, head_dim] per layer) and tables are not in the state dict. Built under
    `torch.device("meta")`, parameters and caches are on meta and the tables are real.
    """

    def __init__(self, config: LaneformerConfig, capacity: int):
        super().__init__()
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}, expected at least 1")
        self.config = config
        self.capacity = capacity
        self.model = Trunk(config, capacity)
        if config.lm_head_type == "lane":
            self.lm_head = ConcatHead(config)
        elif config.lm_head_type == "vocab_parallel":
            self.lm_head = SlicedHead(config)
        elif not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        frequencies = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self.rope = RopeTable(frequencies, capacity, paired=True)

    def forward(self, token: Tensor, position: Tensor) -> Tensor:
        """Logits of every given position.

        Args:
            token: int64 [T], ids.
            position: int64 [T], the distinct cache slots to write; all slots before them must have been written.

        Returns:
            [T, vocab_size] in the parameters' dtype.
        """
        config = self.config
        (turn,) = self.rope.at(position)
        full = visible(position, self.capacity)
        windowed = visible(position, self.capacity, config.sliding_window) if config.window_layers else full
        attention_sum = LaneSum(config, config.use_attention_comm)
        mlp_sum = LaneSum(config, config.use_mlp_comm)

        # Every lane starts from the same row.
        x = self.model.tok_embeddings(token)[:, None].expand(-1, config.num_lanes, -1)
        for layer, block in enumerate(self.model.layers):
            mask = windowed if layer in config.window_layers else full
            x = attention_sum.add(x, block.attention(block.attention_norm(x), position, turn, mask))
            x = mlp_sum.add(x, block.feed_forward(block.ffn_norm(x)))
        return self.logits(x)

    def logits(self, x: Tensor) -> Tensor:
        """The lanes' final streams [T, L, D] → logits [T, V]."""
        config = self.config
        if config.lm_head_type != "replicate":
            return self.lm_head(self.model.norm(x))
        final = self.model.norm(x.sum(1)) if config.pre_norm_lane_agg else self.model.norm(x).mean(1)
        head = self.model.tok_embeddings.weight if config.tie_word_embeddings else self.lm_head.weight
        return F.linear(final, head)
