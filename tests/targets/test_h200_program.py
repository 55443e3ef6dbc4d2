"""A model's program for the h200 is the one for CPUs: the same stages in the same order, the same exchanges, the same deal."""

import dataclasses
import re
from functools import cache

import pytest
from planning import model_of, planned, preset_of

from kogc.compile_passes import Planned
from kogc.ir.passes.separate_combine import separate_combine
from kogc.ir.program import Program
from kogc.targets import load_target

WORKERS = 16
H200 = load_target("h200")
CPU = dataclasses.replace(load_target("cpu", simd="generic"), tile_rows=H200.tile_rows)
#: 32 heads with two splits of 66 words each: more than workers of the h200 read without a stage that combines them.
LLAMA = {
    "model_type": "llama", "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 160, "vocab_size": 101, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "tie_word_embeddings": True, "attention_bias": True,
}  # fmt: skip
MODELS = {"llama-tiny": False, "laneformer-tiny": False, "combined apart": True}


@cache
def programs(name: str) -> tuple[Planned, Planned]:
    """The plans for a CPU with the h200's tiles, and for the h200."""
    model = model_of(LLAMA) if name == "combined apart" else preset_of(name)
    return tuple(planned(model, target, WORKERS) for target in (CPU, H200))


def neutral(program: Program) -> Program:
    """Without what the machines' step sizes and ways to exchange decide."""
    return dataclasses.replace(program, step_tokens=(), buffers=tuple(dataclasses.replace(buffer, slots=1) for buffer in program.buffers))


def stages(program: Program) -> list[tuple[str, int, str]]:
    return [(segment.name, segment.count, stage.name) for segment in program.segments for stage in segment.stages if stage.kind != "combine"]


@pytest.mark.parametrize("name", MODELS)
def test_stages_and_their_order_are_the_same(name):
    cpu, h200 = programs(name)
    assert stages(cpu.program) == stages(h200.program)
    assert any(stage.kind == "combine" for *_, stage in h200.program.instances()) == MODELS[name]


@pytest.mark.parametrize("name", MODELS)
def test_programs_differ_in_combine_stages_slots_and_step_tokens_only(name):
    cpu, h200 = programs(name)
    assert h200.program.step_tokens == (1,)
    assert neutral(h200.program) == neutral(separate_combine(cpu.program, H200.facts["combine_words"]))
    if not MODELS[name]:
        assert [(b.name, b.payload, b.lanes, b.width, b.writes_per_step) for b in h200.program.buffers] == [
            (b.name, b.payload, b.lanes, b.width, b.writes_per_step) for b in cpu.program.buffers
        ]


@pytest.mark.parametrize("name", [name for name, apart in MODELS.items() if not apart])
def test_workers_are_dealt_the_same(name):
    cpu, h200 = programs(name)
    assert cpu.schedule == h200.schedule


@pytest.mark.parametrize("name", [name for name, apart in MODELS.items() if not apart])
def test_emitted_stages_are_called_in_the_same_order_and_exchange_the_same(name):
    cpu, h200 = (plan.rendered.source for plan in programs(name))
    assert exchanges(cpu) == exchanges(h200)
    assert calls(cpu) == calls(h200) == [stage for stage, _ in exchanges(h200)]


def exchanges(source: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """(stage, what it reads and then publishes) in source order. What is read is sorted: a vector that every warp polls by itself
    comes after what is awaited."""
    bodies = re.findall(r"^DEVICE(?:_STAGE)? bool stage_(\w+)\(.*?\) {$(.*?)^}", source, re.M | re.S)
    assert len(bodies) > 5
    return [(stage, reads_first(body)) for stage, body in bodies]


def reads_first(body: str) -> list[tuple[str, str]]:
    body = re.sub(r"if \(visits == 0\) publish_best.*", "", body)  # a worker without rows does so at once
    body = re.sub(r"take_in\w*<[\w, <>]+>\(w, (?:ahead, )?write_of\(", "await(", body)
    found = re.findall(r"\b(await|publish|publish_best)(?:<T>)?\(w, buffer_(\w+)", body)
    reads = [one for one in found if one[0] == "await"]
    assert found and found[: len(reads)] == reads
    return sorted(reads) + found[len(reads) :]


def calls(source: str) -> list[str]:
    return re.findall(r"if \(!stage_(\w+)<T>\(w, (?:0|iteration)\)\) return false;", source)


# ── weights taken ahead ──


@cache
def chained() -> str:
    """Source with stages that are one function. Vectors of 1024 values give every warp a whole row of a unit."""
    wide = {**LLAMA, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 1024, "attention_bias": False}
    return planned(model_of(wide), H200, 2 * WORKERS).rendered.source


def body_of(source: str, function: str) -> str:
    return re.search(rf"^DEVICE(?:_STAGE)? bool {function}\(.*?^}}", source, re.M | re.S)[0]


def test_short_stages_take_the_next_ones_weights():
    """Before a stage without a stream waits; else after its own dots and before its warps meet. Long stages take none."""
    source = chained()
    chain = re.findall(r"if \(!(stage_\w+)<T>\(w, iteration(?:, of_\d+)+\)\) return false;", source)
    assert chain == ["stage_self_attn_combine", "stage_self_attn_o_proj", "stage_mlp_gate_up_proj"]
    combine, o_proj, gate = (body_of(source, name) for name in chain)
    assert combine.index("next.take()") < combine.index("await(")
    assert o_proj.index("take_in_and_dot<") < o_proj.index("next.take()") < o_proj.index("meet(w)")
    assert "(w, ahead, " in o_proj and "(w, ahead, " in gate and "next.take" not in gate


def test_a_step_calls_a_chain_once_and_its_stages_only_in_it():
    source = chained()
    step = source[source.index("DEVICE bool step(Worker& w)") :]
    assert len(re.findall(r"stages_\d+_to_\d+<T>\(w, iteration\)", step)) == 1
    assert not {"stage_self_attn_combine", "stage_self_attn_o_proj", "stage_mlp_gate_up_proj"} & set(re.findall(r"stage_\w+(?=<T>)", step))
