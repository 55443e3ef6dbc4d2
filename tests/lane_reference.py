"""A Laneformer written out lane by lane in NumPy fp64: slow, and sharing nothing with `kogc.models`."""

import math
from typing import Any

import numpy as np


def reference_logits(config: dict[str, Any], weights: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """Logits [T, V] of all positions of `ids`, for a config in the `swa_layers` / `use_*_comm` spelling."""
    lanes, layers, delay = config["num_lanes"], config["num_hidden_layers"], config["broadcast_delay"]
    positions = range(len(ids))
    # streams[t][l] and remembered[sub-block][layer][t][l] are vectors of D.
    streams = [[weights["model.tok_embeddings.weight"][i].copy() for _ in range(lanes)] for i in ids]
    remembered: dict[str, list[list[list[np.ndarray]]]] = {"attention": [], "mlp": []}
    for layer in range(layers):
        for part, block, norm, comm in (
            ("attention", _attention, "attention_norm", config["use_attention_comm"]),
            ("mlp", _mlp, "ffn_norm", config["use_mlp_comm"]),
        ):
            at = f"model.layers.{layer}."
            normed = [[_norm(weights, at + norm, streams[t][l], l, config) for l in range(lanes)] for t in positions]
            out = block(config, weights, layer, normed)
            remembered[part].append(out)
            for t in positions:
                for l in range(lanes):
                    if layer < delay and config["use_early_comm"]:
                        change = sum(out[t])
                    elif layer < delay or not comm:
                        change = math.sqrt(lanes) * out[t][l]
                    else:
                        past = remembered[part][layer - delay][t]
                        change = out[t][l] + sum(past[j] for j in range(lanes) if j != l)
                    streams[t][l] = streams[t][l] + change
    return np.stack([_head(config, weights, streams[t]) for t in positions])


def _norm(weights, name: str, x: np.ndarray, lane: int, config) -> np.ndarray:
    scale = weights[f"{name}.weight"] if f"{name}.weight" in weights else weights[f"{name}.scale"][lane]
    return x / math.sqrt(float(np.mean(x * x)) + config["norm_eps"]) * scale


def _frequencies(config) -> list[float]:
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    found = []
    for pair in range(head_dim // 2):
        frequency = config["rope_theta"] ** (-2 * pair / head_dim)
        if scaling := config.get("rope_scaling"):
            frequency = stretched_frequency(frequency, scaling)
        found.append(frequency)
    return found


def stretched_frequency(frequency: float, scaling) -> float:
    """Llama 3's rule, by wavelength."""
    wavelength = 2 * math.pi / frequency
    context = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    if wavelength < context / high:
        return frequency
    if wavelength > context / low:
        return frequency / scaling["factor"]
    smooth = (context / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / scaling["factor"] + smooth * frequency


def _rope(x: np.ndarray, position: int, frequencies: list[float]) -> np.ndarray:
    out = x.copy()
    for pair, frequency in enumerate(frequencies):
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        a, b = x[2 * pair], x[2 * pair + 1]
        out[2 * pair], out[2 * pair + 1] = a * cos - b * sin, a * sin + b * cos
    return out


def _attention(config, weights, layer: int, normed):
    lanes = config["num_lanes"]
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    heads, kv_heads = config["num_attention_heads"] // lanes, config["num_key_value_heads"] // lanes
    frequencies = _frequencies(config)
    window = config["sliding_window"] if layer in config["swa_layers"] else math.inf
    at = f"model.layers.{layer}.attention."
    out = [[None] * lanes for _ in normed]
    for l in range(lanes):
        q, k, v = (
            [(weights[f"{at}{name}.weight"][l] @ row[l]).reshape(-1, head_dim) for row in normed]
            for name in ("wq", "wk", "wv")
        )
        for t in range(len(normed)):
            mixed = []
            for h in range(heads):
                g = h // (heads // kv_heads)
                seen = [s for s in range(t + 1) if t - s < window]
                query = _rope(q[t][h], t, frequencies)
                scores = [query @ _rope(k[s][g], s, frequencies) / math.sqrt(head_dim) for s in seen]
                power = np.exp(np.array(scores) - max(scores))
                mixed.append(sum(p * v[s][g] for p, s in zip(power / power.sum(), seen, strict=True)))
            out[t][l] = weights[f"{at}wo.weight"][l] @ np.concatenate(mixed)
    return out


def _mlp(config, weights, layer: int, normed):
    at = f"model.layers.{layer}.feed_forward."

    def one(l: int, x: np.ndarray) -> np.ndarray:
        gate = weights[f"{at}w1.weight"][l] @ x
        return weights[f"{at}w2.weight"][l] @ (gate / (1 + np.exp(-gate)) * (weights[f"{at}w3.weight"][l] @ x))

    return [[one(l, x) for l, x in enumerate(row)] for row in normed]


def _head(config, weights, lanes: list[np.ndarray]) -> np.ndarray:
    table = weights["model.tok_embeddings.weight"] if config["tie_word_embeddings"] else weights.get("lm_head.weight")
    if config["pre_norm_lane_agg"]:
        return table @ _norm(weights, "model.norm", sum(lanes), 0, config)
    normed = [_norm(weights, "model.norm", x, l, config) for l, x in enumerate(lanes)]
    if config["lm_head_type"] == "lane":
        return weights["lm_head.linear.weight"] @ np.concatenate(normed)
    if config["lm_head_type"] == "vocab_parallel":
        return np.concatenate([table[l] @ x for l, x in enumerate(normed)])
    return table @ (sum(normed) / len(normed))
