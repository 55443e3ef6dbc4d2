"""A GGUF file of the Llama architecture as a model: names, row order, configuration, tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kogc.frontend.errors import FrontendError
from kogc.frontend.gguf_file import GgufFile
from kogc.frontend.gguf_tokenizer import tokenizer_json
from kogc.frontend.model_input import ModelInput, file_identity, reference_module
from kogc.frontend.sources import CheckedWeights, check_weights
from kogc.models.config import RopeScaling
from kogc.models.layers import rope_frequencies

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
# Stretchings that released Llama 3 models use: (factor, low, high, original context). The file stores only the result.
_KNOWN_SCALINGS = ((8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192))


def load_gguf(path: Path, *, want_tokenizer: bool = True, max_context: int | None = None) -> ModelInput:
    """Read a GGUF file; tensors are dequantised when they are read, q and k rows brought into rotate-half order.

    ``want_tokenizer`` false leaves the file's tokenizer unread (another one will be given).

    Raises:
        FrontendError: damaged file, another architecture, or a feature that is not supported.
    """
    file = GgufFile(path)
    config = _config(file)
    module, context, expected = reference_module(config, str(path), max_context)
    weights = GgufWeights(file, config)
    check_weights(expected, weights.shapes, str(path))
    meta = file.metadata
    return ModelInput(
        name=path.stem,
        module=module,
        weights=CheckedWeights(weights, expected, str(path)),
        config=config,
        tokenizer_json=tokenizer_json(meta, str(path)) if want_tokenizer and "tokenizer.ggml.model" in meta else None,
        chat_template=meta.get("tokenizer.chat_template"),
        eos_ids=_ids(meta, "eos_token_id", "eot_token_id", "eom_token_id"),
        bos_id=meta.get("tokenizer.ggml.bos_token_id"),
        context=context,
        identity=file_identity(path),
        dtype="fp32",
    )


class GgufWeights:
    """The file's tensors under the reference module's names. ``shapes`` gives them without reading values."""

    def __init__(self, file: GgufFile, config: Mapping[str, Any]) -> None:
        self._file = file
        self._head_dim = config["head_dim"]
        self._stored = {_module_name(name): name for name in file.tensors if name != _ROPE_FACTORS}
        self.shapes = {name: file.tensors[stored].shape for name, stored in self._stored.items()}

    def keys(self) -> Iterable[str]:
        return self._stored.keys()

    def get(self, key: str) -> np.ndarray:
        value = self._file.read(self._stored[key])
        return rotate_half_rows(value, self._head_dim) if ".q_proj." in key or ".k_proj." in key else value


def rotate_half_rows(value: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows [heads · head_dim, …] in GGUF order, RoPE pairs side by side, as first halves before second halves."""
    pairs = value.reshape(-1, head_dim // 2, 2, *value.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(value.shape)


def _module_name(stored: str) -> str:
    """``blk.3.attn_q.weight`` → ``model.layers.3.self_attn.q_proj.weight``; an unknown name stays, and is reported as unexpected."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", stored)
    if not match or match[2] not in _NAMES:
        return stored
    prefix = f"model.layers.{match[1]}." if match[1] else ""
    return f"{prefix}{_NAMES[match[2]]}.{match[3]}"


def _config(file: GgufFile) -> dict[str, Any]:
    """The file's metadata as a Transformers Llama configuration."""
    meta, path = file.metadata, file.path
    architecture = meta.get("general.architecture")
    if architecture != "llama":
        raise FrontendError(f"{path} is of architecture {architecture!r}; of GGUF files only 'llama' is supported")

    def field(name: str, *default: Any) -> Any:
        value = meta.get(f"llama.{name}", *default)
        if value is None and not default:
            raise FrontendError(f"{path}: metadata llama.{name} is missing")
        if isinstance(value, list):
            raise FrontendError(f"{path}: llama.{name} differs between layers, which is not supported")
        return value

    for name, plain in (("rope.scaling.type", "none"), ("expert_count", 0)):
        if field(name, plain) != plain:
            raise FrontendError(f"{path}: llama.{name} is {field(name)!r}, only {plain!r} is supported")
    heads, width = field("attention.head_count"), field("embedding_length")
    head_dim = field("attention.key_length", width // heads)
    for name in ("rope.dimension_count", "attention.value_length"):
        if field(name, head_dim) != head_dim:
            raise FrontendError(f"{path}: llama.{name} is {field(name)}, only the whole head dimension ({head_dim}) is supported")
    if "token_embd.weight" not in file.tensors:
        raise FrontendError(f"{path}: tensor token_embd.weight is missing")
    theta = _plain_float(field("rope.freq_base", 10000.0))
    return {
        "model_type": "llama",
        "hidden_size": width,
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": field("feed_forward_length"),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": _plain_float(field("attention.layer_norm_rms_epsilon")),
        "rope_theta": theta,
        "rope_scaling": _scaling(file, head_dim, theta),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }


def _plain_float(value: float) -> float:
    """The decimal number somebody wrote before it was stored as fp32: 9.99999974e-06 → 1e-05."""
    return float(str(np.float32(value)))


def _scaling(file: GgufFile, head_dim: int, theta: float) -> dict[str, Any] | None:
    """Llama-3 stretching, recognised by the factors per frequency that the file stores."""
    if _ROPE_FACTORS not in file.tensors:
        return None
    factors = np.asarray(file.read(_ROPE_FACTORS), np.float64)
    if np.all(factors == 1):
        return None
    plain = rope_frequencies(head_dim, theta, None).numpy()
    for known in _KNOWN_SCALINGS:
        stretched = rope_frequencies(head_dim, theta, RopeScaling(*known)).numpy()
        if factors.shape == plain.shape and np.allclose(plain / stretched, factors, rtol=1e-4):
            factor, low, high, original = known
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise FrontendError(f"{file.path}: {_ROPE_FACTORS} stretches RoPE in a way that is not known; convert from the Hugging Face folder")


def _ids(meta: Mapping[str, Any], *names: str) -> tuple[int, ...]:
    found = (meta.get(f"tokenizer.ggml.{name}") for name in names)
    return tuple(dict.fromkeys(int(token) for token in found if token is not None))
