"""The shapes that are drawn for the GPU: sizes of real models' parts, and sizes that nothing divides."""

from __future__ import annotations

import dataclasses

from random_shapes import Case, Sizes, laneformer_config, llama_config, seeded_case

#: Of each family.
LLAMAS, LANEFORMERS = 72, 40

SIZES = Sizes(
    hidden=(61, 64, 96, 200, 256, 333, 576, 896, 1024, 2048), head_dims=(32, 40, 64, 80, 96, 112, 128, 192, 256),
    groups=(1, 2, 3, 4, 5, 7, 8, 12, 16), feed_forward=(48, 97, 640, 1000, 2816), vocab=(53, 307, 1000, 4099, 32000, 50257),
    windows=(1, 20, 100, 400), capacities=(33, 70, 141, 300), most_queries=4096,
)  # fmt: skip
#: Of a lane.
LANE_SIZES = dataclasses.replace(SIZES, hidden=(61, 64, 96, 128, 200, 256, 512), feed_forward=(17, 48, 97, 320, 512))


def drawn_cases() -> list[Case]:
    """The same on every machine: seeds are their numbers."""
    llamas = [seeded_case(seed, llama_config, SIZES) for seed in range(LLAMAS)]
    return llamas + [seeded_case(seed, laneformer_config, LANE_SIZES) for seed in range(1000, 1000 + LANEFORMERS)]


def name_of(case: Case) -> str:
    """What a failing test says of its shape."""
    config = case.config
    heads = f"{config['num_attention_heads']}x{config['num_key_value_heads']}x{config['head_dim']}"
    lanes = f"-{config['num_lanes']} lanes" if "num_lanes" in config else ""
    return f"{config['model_type']}-{case.dtype}-d{config['hidden_size']}-h{heads}-v{config['vocab_size']}{lanes}-seed{case.seed}"
