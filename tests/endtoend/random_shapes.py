"""Configurations of the reference models at random, and how to compile and feed them: chosen by Hypothesis, or by a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

#: Prompts around the edges of a step of four tokens.
PROMPT_LENGTHS = (1, 3, 4, 5, 8, 9)

#: Takes one of the options it is given.
Choose = Callable[[Sequence], Any]

_EITHER = (False, True)


@dataclass(frozen=True)
class Sizes:
    """What there is to choose from. ``groups``: query heads to a key/value head; ``feed_forward``: of a lane in a Laneformer;
    ``windows``: of the attention layers that have one. Query vectors are at most ``most_queries`` wide."""

    hidden: tuple[int, ...]
    head_dims: tuple[int, ...]
    groups: tuple[int, ...]
    feed_forward: tuple[int, ...]
    vocab: tuple[int, ...]
    windows: tuple[int, ...]
    capacities: tuple[int, ...]
    most_queries: int = 1 << 20


#: For kernels that are compiled and run in a moment on any machine.
SMALL = Sizes(
    hidden=(13, 24, 37, 61, 64, 101), head_dims=(8, 10, 16, 24, 32, 64, 96, 128), groups=(1, 2, 3, 5, 7, 8), feed_forward=(5, 17, 48, 97),
    vocab=(11, 29, 53, 64, 101, 307), windows=(1, 3, 7, 20, 100), capacities=(9, 16, 33, 70, 141),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model, how it is compiled, and the prompts it continues. ``as_file``: by way of a .pt file, else a live module.
    ``workers`` are those of each rank."""

    config: dict[str, Any]
    capacity: int
    dtype: str
    workers: int
    as_file: bool
    prompts: tuple[int, ...]
    seed: int
    ranks: int = 1


def llama_config(choose: Choose, sizes: Sizes = SMALL) -> dict[str, Any]:
    """GQA, rope of both kinds, biases, tied heads."""
    head_dim, group = choose(sizes.head_dims), choose(sizes.groups)
    kv_heads = choose(range(1, 1 + max(1, min(3, sizes.most_queries // (head_dim * group)))))
    stretched = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    return {
        "model_type": "llama", "hidden_size": choose(sizes.hidden), "num_hidden_layers": choose(range(1, 5)),
        "num_attention_heads": kv_heads * group, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "intermediate_size": choose(sizes.feed_forward), "vocab_size": choose(sizes.vocab),
        "max_position_embeddings": max(512, *sizes.capacities), "rms_norm_eps": choose((1e-6, 1e-5)),
        "rope_theta": choose((100.0, 1e4, 5e5)), "rope_scaling": choose((None, None, stretched)),
        "tie_word_embeddings": choose(_EITHER), "attention_bias": choose(_EITHER), "mlp_bias": choose(_EITHER),
    }  # fmt: skip


def laneformer_config(choose: Choose, sizes: Sizes = SMALL) -> dict[str, Any]:
    """Lanes, delays, all three ways of summing, head types, per-lane norms and windows shorter and longer than the text."""
    lanes = choose((1, 2, 3, 4, 8))
    head_dim, group = choose(sizes.head_dims), choose([group for group in sizes.groups if group <= 3])
    kv_heads = lanes * choose((1, 1, 2))
    layers, delay = choose(range(1, 6)), choose(range(1, 4))
    head_type = choose(("replicate", "replicate", "lane", "vocab_parallel"))
    replicate, vocab = head_type == "replicate", choose(sizes.vocab)
    return {
        "model_type": "laneformer", "num_lanes": lanes, "hidden_size": choose(sizes.hidden), "num_hidden_layers": layers,
        "num_attention_heads": kv_heads * group, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "intermediate_size": lanes * choose(sizes.feed_forward), "vocab_size": vocab if replicate else lanes * -(-vocab // lanes),
        "max_position_embeddings": max(512, *sizes.capacities), "norm_eps": 1e-5, "rope_theta": choose((500.0, 1e4)),
        "broadcast_delay": delay, "use_early_comm": choose(_EITHER),
        "use_attention_comm": choose((True, True, True, False)), "use_mlp_comm": choose((True, True, True, False)),
        "lm_head_type": head_type, "pre_norm_lane_agg": replicate and choose(_EITHER),
        "tie_word_embeddings": replicate and choose(_EITHER), "replicated_rmsn_scale": choose(_EITHER),
        "swa_layers": [layer for layer in range(layers) if choose(_EITHER)], "sliding_window": choose(sizes.windows),
    }  # fmt: skip


def case(choose: Choose, config: Callable[[Choose, Sizes], dict[str, Any]], sizes: Sizes = SMALL) -> Case:
    """A model of ``config``'s family, and what is done with it."""
    lengths = list(PROMPT_LENGTHS)
    prompts = [lengths.pop(choose(range(len(lengths)))) for _ in range(choose((2, 3)))]
    return Case(
        config=config(choose, sizes),
        capacity=choose(sizes.capacities),
        dtype=choose(("fp32", "fp16", "bf16")),
        workers=choose(range(1, 6)),
        as_file=choose(_EITHER),
        prompts=tuple(prompts),
        seed=choose(range(2**16)),
    )


# ── chosen by Hypothesis ──


@st.composite
def llama_configs(draw) -> dict[str, Any]:
    return llama_config(lambda options: draw(st.sampled_from(options)))


@st.composite
def laneformer_configs(draw) -> dict[str, Any]:
    return laneformer_config(lambda options: draw(st.sampled_from(options)))


@st.composite
def cases(draw, config: Callable[[Choose, Sizes], dict[str, Any]]) -> Case:
    return case(lambda options: draw(st.sampled_from(options)), config)


@st.composite
def on_ranks(draw, config: Callable[[Choose, Sizes], dict[str, Any]]) -> Case:
    """A case on several ranks that divide its lanes, or its heads and features: these are multiplied until they do."""
    drawn = draw(cases(config))
    lanes = drawn.config.get("num_lanes", 1)
    ranks = draw(st.sampled_from([n for n in (2, 3, 4, 8) if lanes % n == 0] if lanes > 1 else [2, 3, 4]))
    cut = drawn.config if lanes > 1 else drawn.config | _dividing(drawn.config, ranks)
    return replace(drawn, config=cut, ranks=ranks, workers=draw(st.integers(1, 2)))


def _dividing(config: dict[str, Any], ranks: int) -> dict[str, Any]:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    fits = heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)
    more = {} if fits else {"num_attention_heads": heads * ranks, "num_key_value_heads": kv_heads * ranks}
    return more | {"intermediate_size": config["intermediate_size"] * ranks}


# ── chosen by a seed: the same on every machine, whatever its version of Hypothesis ──


def seeded_case(seed: int, config: Callable[[Choose, Sizes], dict[str, Any]], sizes: Sizes) -> Case:
    return case(random.Random(seed).choice, config, sizes)
