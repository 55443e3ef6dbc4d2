"""Reads llama2.c "v0" checkpoints into a Hugging Face style config and state dict."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_rotate_half(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of a q or k matrix [heads · head_dim, K] from interleaved RoPE pairs to rotate-half order."""
    pairs = weight.unflatten(0, (-1, head_dim // 2, 2))
    return pairs.transpose(1, 2).flatten(0, 2).contiguous()


def read_llama2c(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The (config, state_dict) of a v0 file: 7 × int32 (dim, hidden, layers, heads, kv heads, vocab, seq), then fp32.

    Raises:
        ValueError: the file is not as long as its header says.
    """
    data = path.read_bytes()
    dim, hidden, layers, heads, kv_heads, vocab, context = struct.unpack("<7i", data[:28])
    tied, vocab = vocab > 0, abs(vocab)
    head_dim = dim // heads
    kv_dim = kv_heads * head_dim
    values = torch.from_numpy(np.frombuffer(data, dtype="<f4", offset=28).copy())

    def take(*shape: int) -> Tensor:
        nonlocal values
        count = int(np.prod(shape))
        if len(values) < count:
            raise ValueError(f"{path}: the file ends before a tensor of shape {shape}")
        tensor, values = values[:count].view(shape), values[count:]
        return tensor

    state = {"model.embed_tokens.weight": take(vocab, dim)}
    stacked = {
        "input_layernorm": take(layers, dim),
        "self_attn.q_proj": take(layers, dim, dim),
        "self_attn.k_proj": take(layers, kv_dim, dim),
        "self_attn.v_proj": take(layers, kv_dim, dim),
        "self_attn.o_proj": take(layers, dim, dim),
        "post_attention_layernorm": take(layers, dim),
        "mlp.gate_proj": take(layers, hidden, dim),
        "mlp.down_proj": take(layers, dim, hidden),
        "mlp.up_proj": take(layers, hidden, dim),
    }
    for name, tensors in stacked.items():
        for layer, tensor in enumerate(tensors):
            rotated = name.endswith(("q_proj", "k_proj"))
            state[f"model.layers.{layer}.{name}.weight"] = to_rotate_half(tensor, head_dim) if rotated else tensor
    state["model.norm.weight"] = take(dim)
    take(2, context, head_dim // 2)  # The RoPE tables: made anew by the model.
    if not tied:
        state["lm_head.weight"] = take(vocab, dim)
    if len(values):
        raise ValueError(f"{path}: {len(values)} values are left over")
    config = {
        "model_type": "llama",
        "hidden_size": dim,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
    }
    return config, state
