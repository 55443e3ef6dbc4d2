"""Resource gates: emitted kernels keep everything in registers, and the ring for the weights stays deep."""

import dataclasses
import shlex
from functools import cache

import pytest
from planning import model_of, planned, preset_of

from kogc.codegen.pack_index import pack_index
from kogc.codegen.render import render
from kogc.compile_build import build_plan
from kogc.ir.program import Program, Schedule
from kogc.targets import load_target
from kogc.targets.h200 import toolchain
from kogc.targets.h200.cubin import read_array
from kogc.targets.h200.resources import ResourceReport

TARGET = load_target("h200")
#: What hides the time of flight of a chunk while others are read.
FEWEST_SLOTS = 8
#: Tells how many slots the ring has.
SLOTS = 'extern "C" __device__ const int64_t kogc_slots[] = {SLOTS};\n'

MODELS = {
    "Llama with GQA": {
        "model_type": "llama", "hidden_size": 192, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 128, "intermediate_size": 320, "vocab_size": 512, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
        "rope_theta": 1e4, "tie_word_embeddings": True,
    },
    "Laneformer": {
        "model_type": "laneformer", "num_lanes": 4, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 256, "vocab_size": 512, "max_position_embeddings": 256,
        "broadcast_delay": 1, "use_early_comm": False, "lm_head_type": "replicate", "sliding_window": 16, "swa_layers": [0, 1],
    },
}  # fmt: skip
FULL = [("laneformer-2b", "fp16"), ("llama-3.2-1b", "bf16"), ("llama-3.1-8b", "bf16"), ("llama-2.3b", "fp16")]


@cache
def small_plan(name: str) -> tuple[Program, Schedule]:
    result = planned(model_of(MODELS[name]), TARGET, 16)
    return result.program, result.schedule


def compilers() -> list[str]:
    """Values of $KOGC_NVCC: NVRTC, and an nvcc where this machine has one. Each refuses what another takes."""
    nvcc = [shlex.join(c.command) for c in toolchain.find_compilers() if c.command and c.works]
    return ["nvrtc", *nvcc]


def built(source: str) -> tuple[ResourceReport, int]:
    """The figures of a kernel, and the slots of its ring."""
    cubin = toolchain.build(source + SLOTS)
    (slots,) = read_array(cubin.read_bytes(), "kogc_slots")
    return toolchain.resource_report(cubin), slots


def assert_lean(source: str) -> None:
    report, slots = built(source)
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0), report.line
    assert report.losses == (), report.line
    assert report.static_shared + report.dynamic_shared <= TARGET.facts["shared_bytes"], report.line
    assert slots >= FEWEST_SLOTS, f"{slots} slots: {report.line}"


#: Each model and each dtype in plain `pytest`; all of their pairs beside the full-size presets.
SMALL = [
    pytest.param(name, dtype, marks=() if number % len(MODELS) == place else pytest.mark.full)
    for place, name in enumerate(MODELS)
    for number, dtype in enumerate(("bf16", "fp16", "fp32"))
]


@pytest.mark.slow
@pytest.mark.parametrize("name, dtype", SMALL)
def test_small_kernels_neither_spill_nor_use_the_stack(name, dtype, monkeypatch):
    program, plan = small_plan(name)
    program = dataclasses.replace(program, dtype=dtype)
    source = render(program, plan, TARGET, pack_index(program, plan, TARGET.layout)).source
    for compiler in compilers():
        monkeypatch.setenv("KOGC_NVCC", compiler)
        assert_lean(source)


#: (query heads to a key, head_dim, dtype) that go value by value, and take more registers than a thread has unless warps share them out.
BY_VALUE = [(16, 256, "bf16"), (16, 112, "fp32"), (12, 96, "fp16"), (7, 192, "fp32")]


@pytest.mark.slow
@pytest.mark.parametrize("group, head_dim, dtype", BY_VALUE)
def test_heads_of_many_queries_neither_spill_nor_use_the_stack(group, head_dim, dtype):
    heads = {"num_attention_heads": group, "num_key_value_heads": 1, "head_dim": head_dim}
    assert_lean(planned(model_of({**MODELS["Llama with GQA"], **heads}), TARGET, 16, dtype).rendered.source)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("name, dtype", FULL)
def test_kernels_of_full_size_presets(name, dtype):
    """That of the plan, or the first of the target's alternatives that fits."""
    result = planned(preset_of(name, context=None), TARGET, TARGET.facts["workers"], dtype)
    assert_lean(build_plan(result, TARGET, lambda step, done, total: None).planned.rendered.source)
