"""A seeded two-layer Llama as a checkpoint file."""

from collections.abc import Callable
from pathlib import Path

import torch

from kogc.models.build import build_model

TINY = {
    "model_type": "llama",
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "vocab_size": 53,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def save_tiny(path: Path, change: Callable[[dict, dict], None] = lambda config, tensors: None) -> Path:
    """A seeded tiny Llama as .pt; ``change`` may spoil its config and tensors first."""
    torch.manual_seed(3)
    config, tensors = dict(TINY), build_model(TINY, 64).state_dict()
    change(config, tensors)
    torch.save({"config": config, "state_dict": tensors}, path)
    return path
