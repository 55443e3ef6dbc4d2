"""Laneformer over whole batches of sequences, without caches: the same weights and rule, laid out for training."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from kogc.models.laneformer import Attention, FeedForward, Laneformer, LaneLinear


def batch_logits(model: Laneformer, tokens: Tensor) -> Tensor:
    """Logits of every position of every sequence, each sequence starting at position 0.

    Equals `model(row, arange(T))` row by row, but keeps gradients and touches no cache. Streams are [L, B·T, D] here,
    so that every lane linear is one batched matrix product.

    Args:
        tokens: int64 [B, T], T at most `model.capacity`.

    Returns:
        [B, T, vocab_size].

    Raises:
        ValueError: the model's head or norms are of a kind this path does not train.
    """
    config = model.config
    if config.lm_head_type != "replicate" or config.pre_norm_lane_agg or not config.replicated_rmsn_scale:
        raise ValueError("batch_logits trains shared norms and the `replicate` head without `pre_norm_lane_agg` only")
    batch, length = tokens.shape
    cos, sin = model.rope.pair[:length].unbind(-1)
    full, windowed = _masks(length, config.sliding_window)
    trunk = model.model

    row = trunk.tok_embeddings(tokens.flatten())
    x = row[None].expand(config.num_lanes, -1, -1)
    outputs: dict[str, list[Tensor]] = {"attention": [], "mlp": []}
    for layer, block in enumerate(trunk.layers):
        mask = windowed if layer in config.window_layers else full
        mixed = _attention(block.attention, _norm(x, block.attention_norm), batch, cos, sin, mask)
        x = x + _reduced(model, outputs["attention"], mixed, config.use_attention_comm)
        mixed = _feed_forward(block.feed_forward, _norm(x, block.ffn_norm))
        x = x + _reduced(model, outputs["mlp"], mixed, config.use_mlp_comm)
    head = trunk.tok_embeddings.weight if config.tie_word_embeddings else model.lm_head.weight
    return F.linear(_norm(x, trunk.norm).mean(0), head).unflatten(0, (batch, length))


def _masks(length: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Bool [T, T] for full and for window layers."""
    position = torch.arange(length)
    age = position[:, None] - position
    full = age >= 0
    return full, full if window is None else full & (age < window)


def _norm(x: Tensor, norm: torch.nn.Module) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)


def _lane_linear(x: Tensor, linear: LaneLinear) -> Tensor:
    """[L, N, K] → [L, N, outputs]."""
    return torch.bmm(x, linear.weight.transpose(1, 2))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on neighbouring pairs of x [..., T, head_dim], with real arithmetic."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def _attention(block: Attention, x: Tensor, batch: int, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
    """Normed streams [L, B·T, D] → outputs [L, B·T, D]."""
    length = mask.shape[0]

    def heads(linear: LaneLinear) -> Tensor:
        # A lane is one more batch axis of attention: [L, B·T, n] → [L·B, heads of a lane, T, head_dim].
        out = _lane_linear(x, linear).view(block.lanes * batch, length, -1, block.head_dim)
        return out.transpose(1, 2)

    query, key = _rotate(heads(block.wq), cos, sin), _rotate(heads(block.wk), cos, sin)
    grouped = query.shape[1] != key.shape[1]
    mixed = F.scaled_dot_product_attention(query, key, heads(block.wv), attn_mask=mask, enable_gqa=grouped)
    return _lane_linear(mixed.transpose(1, 2).reshape(block.lanes, batch * length, -1), block.wo)


def _feed_forward(block: FeedForward, x: Tensor) -> Tensor:
    return _lane_linear(F.silu(_lane_linear(x, block.w1)) * _lane_linear(x, block.w3), block.w2)


def _reduced(model: Laneformer, outputs: list[Tensor], output: Tensor, communicates: bool) -> Tensor:
    """What a layer adds to the streams, [L, N, D] (or [1, N, D] when all lanes get the same)."""
    config = model.config
    layer = len(outputs)
    outputs.append(output)
    if layer < config.broadcast_delay and config.use_early_comm:
        return output.sum(0, keepdim=True)
    if layer < config.broadcast_delay or not communicates:
        return math.sqrt(config.num_lanes) * output
    past = outputs[layer - config.broadcast_delay]
    return output + (past.sum(0, keepdim=True) - past)
