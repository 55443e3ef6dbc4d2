"""Llama as a plain PyTorch module: one decode step over KV caches, named as Transformers names its tensors."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kogc.models.config import LlamaConfig
from kogc.models.layers import KVCache, RMSNorm, RopeTable, rope_frequencies, visible, widen


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on pairs (x[i], x[i + head_dim/2]).

    `x` is [T, heads, head_dim], `cos` and `sin` are [T, head_dim / 2]; computed in at least fp32.
    """
    first, second = widen(x).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with its own KV cache."""

    def __init__(self, config: LlamaConfig, capacity: int):
        super().__init__()
        hidden, head, bias = config.hidden_size, config.head_dim, config.attention_bias
        queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
        self.head_dim = head
        self.q_proj = nn.Linear(hidden, queries, bias=bias)
        self.k_proj = nn.Linear(hidden, keys, bias=bias)
        self.v_proj = nn.Linear(hidden, keys, bias=bias)
        self.o_proj = nn.Linear(queries, hidden, bias=bias)
        self.cache = KVCache(config.num_key_value_heads, capacity, head)

    def forward(self, x: Tensor, position: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """x [T, D] → [T, D]; appends the T positions to the cache first."""
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        self.cache.append(rotate_half(key, cos, sin), value, position)
        return self.o_proj(self.cache.attend(rotate_half(query, cos, sin), mask))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate x) · up x)."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[T, D] → [T, D]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer: attention and MLP, each behind a norm and added to the residual."""

    def __init__(self, config: LlamaConfig, capacity: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, capacity)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, position: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """[T, D] → [T, D]."""
        x = x + self.self_attn(self.input_layernorm(x), position, cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    """Everything the released names put under `model.`."""

    def __init__(self, config: LlamaConfig, capacity: int):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, capacity) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Llama(nn.Module):
    """Llama for one sequence, decoding `T` positions per call.

    Args:
        config: the model's shape.
        capacity: positions the KV caches and RoPE tables hold; `position` must stay below it.

    Tensors are named as in Transformers checkpoints (`model.layers.0.self_attn.q_proj.weight`, q and k rows in
    rotate-half order); with tied embeddings there is no `lm_head.weight`. Caches and tables are not in the state dict.
    Built under `torch.device("meta")`, parameters and caches are on meta and the tables are real.
    """

    def __init__(self, config: LlamaConfig, capacity: int):
        super().__init__()
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}, expected at least 1")
        self.config = config
        self.capacity = capacity
        self.model = Trunk(config, capacity)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        frequencies = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self.rope = RopeTable(frequencies, capacity, paired=False)

    def forward(self, token: Tensor, position: Tensor) -> Tensor:
        """Logits of every given position.

        Args:
            token: int64 [T], ids.
            position: int64 [T], the distinct cache slots to write; all slots before them must have been written.

        Returns:
            [T, vocab_size] in the parameters' dtype.
        """
        x = self.model.embed_tokens(token)
        cos, sin = self.rope.at(position)
        mask = visible(position, self.capacity)
        for block in self.model.layers:
            x = block(x, position, cos, sin, mask)
        head = self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight
        return F.linear(self.model.norm(x), head)
