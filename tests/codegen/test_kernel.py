"""Kernels compiled and run: logits and tokens against the program's interpreter, for every shape and option."""

import dataclasses

import numpy as np
import pytest
from kernel_harness import Kernel, rounded_weights
from program_fixture import laneformer, llama

from kogc.codegen.launch import LAUNCH_VERSION
from kogc.ir.passes.roll_interpret import ProgramRun, interpret_program
from kogc.ir.passes.separate_combine import separate_combine
from kogc.ir.program import Const, OpSpec

pytestmark = pytest.mark.compiler

#: Relative RMSE of the logits; KV caches are rounded to the storage dtype by the kernel and not by the interpreter.
LIMITS = {"fp32": 2e-6, "fp16": 2e-3, "bf16": 1.5e-2}
IDS = [3, 11, 7, 0, 19, 2, 2, 5, 6]

PROGRAMS = {
    "llama": llama(),
    "biases, interleaved rope": llama(bias=True, rope="interleaved", head_dim=8),
    "one query head per key head": llama(heads=2, kv_heads=2, splits=1),
    "eight query heads per key head": llama(heads=8, kv_heads=1, splits=4),
    "head of 24": llama(head_dim=24, dim=40, heads=6, kv_heads=2),
    "head of 96": llama(head_dim=96, heads=3, kv_heads=1, splits=3),
    "head of 20, prime widths": llama(head_dim=20, dim=37, ffn=53, vocab=101),
    "head of 128": llama(head_dim=128, heads=2, kv_heads=1),
    "wide": llama(dim=144, ffn=272, vocab=401),
    "window": llama(window=3, delay=3),
    "lanes": laneformer(),
    "lanes, early sums": laneformer(early="present"),
    "lanes, early sums, delay 1": laneformer(early="present", delay=1),
    "vocabulary per lane": laneformer(head="vocab_parallel", vocab=54),
    "four lanes, window": laneformer(lanes=4, heads=8, kv_heads=4, ffn=64, window=3, delay=1),
    "combined apart": separate_combine(llama(heads=4, kv_heads=2, head_dim=8, splits=3), 0),
    "combined apart, several heads in a tile": separate_combine(llama(heads=7, kv_heads=7, head_dim=2, splits=4), 0),
    "combined apart, heads across tiles": separate_combine(llama(heads=9, kv_heads=3, head_dim=22, splits=2), 0),
    "combined apart in lanes": separate_combine(laneformer(lanes=3, heads=6, kv_heads=3, ffn=39, head_dim=10, delay=1), 0),
    "three lanes": laneformer(lanes=3, heads=6, kv_heads=3, ffn=39, dim=26, delay=3, layers=5),
}


def relative_rmse(found, expected):
    return np.sqrt(((found - expected) ** 2).mean() / (expected**2).mean())


def reference(kernel: Kernel, ids) -> np.ndarray:
    return interpret_program(kernel.program, kernel.weights, kernel.tables, ids, 4)


@pytest.fixture(scope="module")
def small():
    return Kernel(llama())


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_logits_equal_the_interpreter(program):
    kernel = Kernel(program)
    assert relative_rmse(kernel.logits(IDS), reference(kernel, IDS)) < LIMITS["fp32"]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", ["biases, interleaved rope", "head of 20, prime widths", "lanes, early sums"])
def test_logits_in_half_precision(name, dtype):
    kernel = Kernel(dataclasses.replace(PROGRAMS[name], dtype=dtype))
    assert relative_rmse(kernel.logits(IDS), reference(kernel, IDS)) < LIMITS[dtype]


@pytest.mark.parametrize("tile_rows, dtype", [(4, "fp32"), (8, "bf16"), (16, "fp16")])
def test_plain_vector_code_of_every_width(tile_rows, dtype):
    kernel = Kernel(laneformer(dtype=dtype, head_dim=12, bias=True), simd="generic", tile_rows=tile_rows)
    assert relative_rmse(kernel.logits(IDS), reference(kernel, IDS)) < LIMITS[dtype]


#: Every tile size and every kind of head in plain `pytest`, all of their pairs in `.ci/run`.
COMBINES = [
    pytest.param(head_dim, splits, tile_rows, marks=() if heads == tiles else pytest.mark.full)
    for heads, (head_dim, splits) in enumerate([(6, 5), (16, 1), (22, 3)])
    for tiles, tile_rows in enumerate([4, 8, 16])
]


@pytest.mark.parametrize("head_dim, splits, tile_rows", COMBINES)
def test_a_combine_stage_adds_the_same_numbers_as_a_prologue(head_dim, splits, tile_rows):
    program = llama(heads=5, kv_heads=1, head_dim=head_dim, splits=splits, layers=2)
    one, other = (Kernel(p, workers=3, simd="generic", tile_rows=tile_rows) for p in (program, separate_combine(program, 0)))
    assert np.array_equal(one.logits(IDS), other.logits(IDS))


@pytest.mark.parametrize("program, workers", [(llama(), 1), (llama(), 9), (laneformer(early="present"), 5)])
def test_any_number_of_workers(program, workers):
    kernel = Kernel(program, workers=workers)
    assert kernel.query(1) == workers
    assert relative_rmse(kernel.logits(IDS), reference(kernel, IDS)) < LIMITS["fp32"]


@pytest.mark.parametrize("length", range(1, 10))
def test_prompt_lengths_around_the_step(small, length):
    ids = IDS[:length]
    expected = reference(small, ids)
    assert relative_rmse(small.logits(ids), expected) < LIMITS["fp32"]
    assert small.generate(ids, 1).tokens == [expected[-1].argmax()]


@pytest.mark.parametrize("program", [llama(), laneformer()], ids=["llama", "laneformer"])
def test_generation_is_greedy(program):
    kernel = Kernel(program, weights=rounded_weights(program, seed=4, scale=0.6))
    tokens = kernel.generate(IDS, 12).tokens
    text = IDS + tokens
    assert tokens == reference(kernel, text)[len(IDS) - 1 : -1].argmax(-1).tolist()
    assert len(set(tokens)) > 2, "these weights show nothing"


def test_repeats_are_bit_identical():
    kernel = Kernel(laneformer(dtype="fp16"), workers=3)
    first, tokens = kernel.logits(IDS), kernel.generate(IDS, 15).tokens
    for _ in range(3):
        assert np.array_equal(kernel.logits(IDS), first)
        assert kernel.generate(IDS, 15).tokens == tokens


def test_context_kept_between_launches(small):
    whole = small.logits(IDS)
    small.generate(IDS[:5], 0)
    assert relative_rmse(small.logits(IDS[5:], start=5), whole[5:]) < LIMITS["fp32"]


@pytest.mark.parametrize("window", [0, 70])
def test_long_context_over_several_key_blocks(window):
    program = llama(capacity=160, window=window, delay=2, splits=3, layers=2)
    kernel = Kernel(program)
    ids = (np.arange(150) * 7 % 53).tolist()
    assert relative_rmse(kernel.logits(ids), reference(kernel, ids)) < LIMITS["fp32"]


# ── ends ──


def test_stop_id_is_kept_and_ends(small):
    tokens = small.generate(IDS, 6).tokens
    run = small.generate(IDS, 6, stop=[52, tokens[2]])
    assert run.reason == "stop" and run.tokens == tokens[: tokens.index(tokens[2]) + 1]


def test_length(small):
    run = small.generate(IDS, 4)
    assert run.reason == "length" and len(run.tokens) == 4
    assert run.state.start_ns <= run.state.first_token_ns <= run.state.end_ns


def test_context_fills_up(small):
    run = small.generate(IDS, 100)
    assert run.reason == "context" and len(run.tokens) == small.program.capacity - len(IDS) + 1


def test_prompt_longer_than_the_context(small):
    run = small.generate(list(range(33)), 4)
    assert run.reason == "context" and run.tokens == []


def test_prompt_that_fills_the_context(small):
    ids = (IDS * 4)[:32]
    run = small.generate(ids, 4)
    assert run.reason == "context" and run.tokens == [small.logits(ids)[-1].argmax()]


def test_no_tokens_asked_for(small):
    run = small.generate(IDS, 0)
    assert run.reason == "length" and run.tokens == []


def test_nan_in_the_logits_names_the_position():
    kernel = Kernel(llama())
    row = kernel.index.embed_offset + IDS[5] * 24 * 4
    kernel.pack[row : row + 4] = np.array([np.nan], np.float32).view(np.uint8)
    run = kernel.launch(IDS, mode=1).run()
    assert run.reason == "nan" and run.state.nan_position == 5
    assert kernel.generate(IDS[:5], 1).reason == "length"
    assert kernel.generate(IDS[:6], 1).reason == "nan"


def test_another_launch_version_is_refused(small):
    launch = small.launch(IDS)
    launch.launch.version += 1
    assert launch.run().result == 1


def test_queries(small):
    made = small.rendered
    facts = [LAUNCH_VERSION, 2, small.tile_rows, 4, 53, 32, made.exchange_bytes, made.kv_bytes, made.probe_floats, len(made.plan) // 4]
    assert [small.query(number) for number in range(len(facts))] == facts
    assert small.query(len(facts)) == small.query(-1) == -1


# ── ops that the hand-built models do not have ──


def with_stage(program, name, **changes):
    swap = lambda stage: dataclasses.replace(stage, **{k: v(stage) for k, v in changes.items()}) if stage.name == name else stage
    segments = tuple(dataclasses.replace(s, stages=tuple(swap(stage) for stage in s.stages)) for s in program.segments)
    return dataclasses.replace(program, segments=segments)


def assert_right(program):
    kernel = Kernel(program)
    assert relative_rmse(kernel.logits(IDS), reference(kernel, IDS)) < LIMITS["fp32"]


def test_every_activation():
    """h = relu(gate) · up + gelu(gate) + gelu_tanh(up) + sigmoid(gate) · up + tanh(up)."""

    def parts(stage):
        (part,) = stage.parts
        terms = [
            OpSpec("t0", "gated_activation", ("dot0", "dot1"), {"fn": "relu"}, 1, 40),
            OpSpec("t1", "activation", ("dot0",), {"fn": "gelu"}, 1, 40),
            OpSpec("t2", "activation", ("dot1",), {"fn": "gelu_tanh"}, 1, 40),
            OpSpec("t3", "gated_activation", ("dot0", "dot1"), {"fn": "sigmoid"}, 1, 40),
            OpSpec("t4", "activation", ("dot1",), {"fn": "tanh"}, 1, 40),
        ]
        sums = [OpSpec(f"s{i}", "add", (f"s{i - 1}" if i > 1 else "t0", f"t{i}"), {}, 1, 40) for i in (1, 2, 3, 4)]
        output = dataclasses.replace(part.outputs[0], value="s4")
        return (dataclasses.replace(part, epilogue=(*terms, *sums), outputs=(output,)),)

    assert_right(with_stage(llama(), "gate_up_0", parts=parts))


def test_every_form_of_the_norms():
    """A chain of norms with and without scale, bias and offset, over a width that fills no tile."""

    def prologue(stage):
        (norm,) = stage.prologue
        scale, bias = "ffn_norm_scale", "ffn_norm_bias"
        chain = [
            ("layer_norm", (), {"eps": 1e-5}),
            ("layer_norm", (scale,), {"eps": 1e-5}),
            ("layer_norm", (scale, bias), {"eps": 1e-5}),
            ("rms_norm", (), {"eps": 1e-6}),
            ("rms_norm", (scale,), {"eps": 1e-5, "scale_offset": 1.0}),
        ]
        specs, source = [], norm.inputs[0]
        for number, (op, extra, attrs) in enumerate(chain):
            name = norm.name if number == len(chain) - 1 else f"n{number}"
            specs.append(OpSpec(name, op, (source, *extra), attrs, 1, 29))
            source = name
        return tuple(specs)

    def consts(stage):
        keys = tuple(f"layers.{i}.ffn_norm.bias" for i in range(3))
        return (*stage.consts, Const("ffn_norm_bias", "weight", keys, 1, (29,)))

    assert_right(with_stage(llama(dim=29), "gate_up_0", prologue=prologue, consts=consts))


def test_row_ops_in_an_epilogue():
    """Logits: softcap(sigmoid(scale(dot)) · dot)."""

    def parts(stage):
        (part,) = stage.parts
        epilogue = (
            OpSpec("scaled", "scale", ("dot0",), {"factor": -1.7}, 1, 53),
            OpSpec("opened", "activation", ("scaled",), {"fn": "sigmoid"}, 1, 53),
            OpSpec("product", "mul", ("opened", "dot0"), {}, 1, 53),
            OpSpec("capped", "softcap", ("product",), {"cap": 3.0}, 1, 53),
        )
        return (dataclasses.replace(part, epilogue=epilogue, outputs=(dataclasses.replace(part.outputs[0], value="capped"),)),)

    assert_right(with_stage(llama(), "head", parts=parts))


def test_row_ops_in_a_prologue():
    def prologue(stage):
        (norm,) = stage.prologue
        return (norm, OpSpec("capped", "softcap", (norm.name,), {"cap": 2.0}, 1, 24), OpSpec("sum", "add", ("capped", "x"), {}, 1, 24))

    capped = lambda stage: dataclasses.replace(stage.attention, softcap=1.5)  # and scores too
    program = with_stage(llama(), "gate_up_0", prologue=prologue, vector=lambda stage: "sum")
    assert_right(with_stage(program, "attention_0", attention=capped))


def test_lanes_side_by_side_before_the_head():
    program = laneformer()

    def prologue(stage):
        return (stage.prologue[0], OpSpec("joined", "lane_concat", (stage.prologue[0].name,), {}, 1, 48, "all"))

    def parts(stage):
        (part,) = stage.parts
        return (dataclasses.replace(part, matrices=(dataclasses.replace(part.matrices[0], k=48),)),)

    wide = {"vector": lambda s: "joined", "vector_width": lambda s: 48}
    assert_right(with_stage(program, "head", prologue=prologue, parts=parts, **wide))


def test_the_others_in_a_prologue():
    """The delayed sum taken by the stage that reads the residual instead of the one that writes it."""

    def prologue(stage):
        (norm,) = stage.prologue
        return (
            OpSpec("others", "lane_others", ("past",), {}, 2, 24),
            OpSpec("more", "add", ("x", "others"), {}, 2, 24),
            dataclasses.replace(norm, inputs=("more", *norm.inputs[1:])),
        )

    program = laneformer()
    past = next(o for s in program.segments[2].stages for o in s.operands if o.name == "past" and s.name == "o_2")
    operands = lambda stage: (*stage.operands, dataclasses.replace(past, access="all_lanes"))
    assert_right(with_stage(program, "gate_up_2", prologue=prologue, operands=operands))


# ── probes ──


PROBED = {
    "llama": llama(bias=True),
    "laneformer": laneformer(early="present"),
    "combined apart": separate_combine(laneformer(head_dim=10), 0),
}


@pytest.mark.parametrize("program", PROBED.values(), ids=PROBED)
def test_probes_hold_what_every_stage_published(program):
    kernel = Kernel(program, defines=("KOGC_PROBE",))
    kernel.logits(IDS[:8])
    run = ProgramRun(program, kernel.weights, kernel.tables)
    for start in (0, 4):
        run.step(IDS[start : start + 4], range(start, start + 4))
    published = {}
    for (segment, iteration, number, value, buffer), array in run.published.items():
        stage = program.segments[segment].stages[number]
        published[stage.name, iteration, value, buffer] = array
    assert len(kernel.rendered.probe) > 10
    for entry in kernel.rendered.probe:
        found = kernel.probe[entry.offset :][: 4 * entry.lanes * entry.width].reshape(4, entry.lanes, entry.width)
        expected = published[entry.stage_name, entry.iteration, entry.value, entry.buffer]
        finite = np.isfinite(expected)
        assert np.array_equal(finite, np.isfinite(found)), entry
        assert np.abs(found[finite] - expected[finite]).max() < 1e-4 * max(1, np.abs(expected[finite]).max()), entry
