"""What the emitted source looks like: complete, readable, and no longer for deeper models."""

import dataclasses
import re
import subprocess
from pathlib import Path

import jinja2
import pytest
from kernel_harness import rendered
from program_fixture import laneformer, llama, with_stages

import kogc.templates
from kogc.codegen.names import Scope, float_literal, identifier
from kogc.codegen.pack_index import pack_index
from kogc.codegen.render import render
from kogc.codegen.stage_values import RenderError
from kogc.ir.passes.schedule import schedule
from kogc.ir.passes.separate_combine import separate_combine
from kogc.targets import load_target, target_names

SIMD = "avx2"


def source(program, simd=SIMD, workers=2):
    return rendered(program, workers, simd).source


def shape_of(text: str) -> str:
    """The text with every number replaced: what must not depend on depth."""
    return re.sub(r"\d+", "#", text)


def with_prologue_op(program, op):
    """``program`` whose norms are ``op`` instead."""
    change = lambda stage: dataclasses.replace(stage, prologue=tuple(dataclasses.replace(o, op=op) for o in stage.prologue))
    return with_stages(program, change)


def test_one_function_per_stage_in_source_order_and_called_in_it():
    text = source(llama())
    defined = re.findall(r"^DEVICE_STAGE bool (stage_\w+)\(Worker& w, int iteration\)", text, re.M)
    called = re.findall(r"if \(!(stage_\w+)<T>\(w, (?:0|iteration)\)\) return false;", text)
    assert defined == ["stage_embed", "stage_qkv_0", "stage_attention_0", "stage_o_0", "stage_gate_up_0", "stage_m_0", "stage_head", "stage_sample"]
    assert called == defined
    assert "for (int iteration = 0; iteration < 3; ++iteration)" in text


def test_a_combine_stage_hands_on_rows_of_the_records_of_its_lane():
    text = source(separate_combine(laneformer(heads=8, kv_heads=4, head_dim=6, splits=3), 0))
    found = re.search(r"^DEVICE_STAGE bool stage_attention_0_combine\(.*?^}", text, re.M | re.S)[0]
    assert "records[t] = partials.at(t, lane);" in found
    finish = re.search(r"const auto (\w+) = \[&\]\(int unit, const vec \(&row\)\[1\]\[T\]\) {", found)[1]
    assert f"combine_rows<4, 6, 3, T>(w, records, first, count, {finish});" in found
    assert "store_rows<Rows>(new_attended.at(t, lane), unit, 0, row_rows);" in found and "PROBE(" in found
    assert "publish(w, buffer_attended(), new_attended, place);" in found
    assert "attention_combine<" not in text and "Waits for attended (lane), x (rows)." in text


def test_names_of_stages_by_number():
    made = rendered(llama(), simd=SIMD)
    assert made.stages[1] == "qkv_0" and made.stages[-1] == "sample"
    assert "const Place place = {1, iteration};" in made.source


@pytest.mark.parametrize("build, shallow, deep", [(llama, 4, 32), (laneformer, 6, 32)])
def test_source_does_not_grow_with_depth(build, shallow, deep):
    assert shape_of(source(build(layers=shallow))) == shape_of(source(build(layers=deep)))


def test_source_does_not_depend_on_the_number_of_workers():
    assert shape_of(source(llama(), workers=2)) == shape_of(source(llama(), workers=7))


def test_source_is_self_contained():
    text = source(llama())
    assert set(re.findall(r"#include <(.*)>", text)) == {
        "immintrin.h", "pthread.h", "sched.h", "signal.h", "stdint.h", "stdlib.h", "time.h",
    }  # fmt: skip
    assert "#include \"" not in text and "std::" not in text
    assert "{{" not in text and "{%" not in text


def test_source_begins_with_what_it_is():
    head = source(llama()).split("#include")[0]
    for fact in ("toy", "CPU threads (avx2)", "2 workers", "fp32", "3 × layers_0_2: qkv_0, attention_0, o_0, gate_up_0, m_0", "1 or 4 tokens"):
        assert fact in head


def test_only_used_ops_are_emitted():
    text = source(llama())
    assert "vec silu(vec x)" in text and "vec gelu" not in text and "void layer_norm" not in text


def test_every_step_width_is_instantiated():
    text = source(llama())
    assert re.findall(r"return step<(\d)>\(w\);", text) == ["1", "4"]


def test_entry_points_have_c_linkage():
    assert re.findall(r'extern "C" __attribute__\(\(visibility\("default"\)\)\) \w+ (\w+)\(', source(llama())) == ["kogc_run", "kogc_wait", "kogc_query"]


@pytest.mark.parametrize("simd, tile_rows", [("avx512", 16), ("avx2", 8), ("neon", 8), ("generic", 8)])
def test_vector_code_is_chosen_by_kind(simd, tile_rows):
    text = source(llama(), simd)
    assert f"constexpr int TILE_ROWS = {tile_rows};" in text
    assert ("_mm512" in text, "_mm256_fmadd" in text, "arm_neon" in text) == (simd == "avx512", simd == "avx2", simd == "neon")


def test_unknown_vector_code_names_the_known_ones():
    with pytest.raises(KeyError, match="avx2"):
        load_target("cpu", simd="mmx")


def test_unknown_target_names_the_known_ones():
    with pytest.raises(KeyError, match="cpu"):
        load_target("abacus")


def test_op_without_code_is_named_with_its_stage():
    with pytest.raises(RenderError, match=r"stage qkv_0: op fourier has no prologue code"):
        source(with_prologue_op(llama(), "fourier"))


def test_epilogue_op_without_code_is_named_with_its_stage():
    def change(stage):
        swap = lambda part: dataclasses.replace(part, epilogue=tuple(dataclasses.replace(o, op="sort") for o in part.epilogue))
        return dataclasses.replace(stage, parts=tuple(swap(part) for part in stage.parts)) if stage.name == "m_0" else stage

    with pytest.raises(RenderError, match=r"stage m_0: op sort has no epilogue code"):
        source(with_stages(llama(), change))


def test_reading_an_unknown_value_is_an_error():
    def change(stage):
        return dataclasses.replace(stage, vector="ghost") if stage.name == "gate_up_0" else stage

    with pytest.raises(RenderError, match="stage gate_up_0 reads ghost"):
        source(with_stages(llama(), change))


def test_schedule_for_another_tile_is_refused():
    program, target = llama(), load_target("cpu", simd=SIMD)
    other = schedule(program, 2, 4)
    with pytest.raises(RenderError, match="tiles of 4 rows"):
        render(program, other, target, pack_index(program, other, target.layout))


def test_templates_never_ask_for_the_machine():
    for path in Path(kogc.templates.__file__).parent.glob("*.j2"):
        text = path.read_text()
        assert "target.name" not in text, path
        for conditional in re.findall(r"{% if .*?%}", text):
            assert "target" not in conditional and "machine" not in conditional, (path, conditional)


def test_missing_names_in_templates_are_errors():
    from kogc.codegen.render import _environment

    with pytest.raises(jinja2.UndefinedError):
        _environment().from_string("{{ nothing_of_the_kind }}").render()


MACHINES = [
    ("avx512", "x86_64-linux-gnu", "sapphirerapids"), ("avx512", "x86_64-linux-gnu", "znver4"), ("avx2", "x86_64-linux-gnu", "x86_64_v3"),
    ("generic", "x86_64-linux-gnu", "x86_64"), ("neon", "aarch64-linux-gnu", None), ("neon", "aarch64-macos", None),
]  # fmt: skip


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("simd, machine, march", MACHINES)
def test_source_is_valid_for_machines_that_are_not_here(tmp_path, simd, machine, march, dtype):
    """Checked, not run: the wheel's clang knows every target."""
    ziglang = pytest.importorskip("ziglang")
    program = separate_combine(laneformer(dtype=dtype, early="present", bias=True), 0)
    (tmp_path / "kernel.cpp").write_text(source(program, simd))
    zig = Path(ziglang.__file__).parent / "zig"
    # -c: for anything else zig would link, and build a C++ library for the machine first, which takes minutes.
    flags = ["-std=c++17", "-c", "-o", "kernel.o", "-Werror", "-Wall", "-Wno-unused-const-variable", "-Wno-unused-function", "-target", machine]
    found = subprocess.run([zig, "c++", *flags, *([f"-march={march}"] if march else []), "kernel.cpp"], cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


#: Functions of the language itself, which a machine layer need not define.
BUILT_IN = {"cpu": set(), "h200": {"fma", "exp", "tanh", "erfc", "rsqrt"}}


@pytest.mark.parametrize(("name", "ranks"), [*((name, 1) for name in target_names()), ("cpu", 2)])
def test_machine_layer_offers_the_documented_primitives(name, ranks):
    import kogc.targets

    target = load_target(name, **({"simd": SIMD} if name == "cpu" else {}))
    rows = re.findall(r"^\S.*(?:\n .*)*", kogc.targets.__doc__.split("=\n", 1)[1], re.M)
    flagged = [row for row in rows if row.startswith("own flags ")]  # of machines alone whose words carry their own flags
    ranked = [row for row in rows if row.startswith("ranks ")]  # of kernels of several ranks alone
    drawing = [row for row in rows if row.startswith("sampling ")]  # of machines alone that draw tokens
    assert len(rows) > 10 and len(flagged) == len(ranked) == len(drawing) == 1
    left_out = (flagged if target.near_floats is None else []) + (ranked if ranks == 1 else []) + ([] if target.samples else drawing)
    table = "\n".join(row for row in rows if row not in left_out)
    listed = set(re.findall(r"``(\w+)(?:<[^`]*>)?``", table)) - {"DEVICE"} - BUILT_IN[name]
    machine = target.machine_for(ranks)
    text = "\n".join((*machine.before, *machine.layer, *machine.entry))
    assert {word for word in listed if not re.search(rf"\b{word}\b", text)} == set()


# ── names ──


def test_identifiers():
    assert identifier("self_attn.q_proj") == "self_attn_q_proj"
    assert identifier("0.weight") == "n0_weight"
    assert identifier("→") == "value"


def test_scope_keeps_names_apart_and_avoids_words_of_the_language():
    scope = Scope()
    assert [scope.name("a", "x"), scope.name("b", "x"), scope.name("a", "x")] == ["x", "x_2", "x"]
    assert scope.name("for") == "for_2"
    assert Scope(scope).name("c", "x") == "x_3"


@pytest.mark.parametrize("value, text", [(1, "1.0f"), (1e-5, "1e-05f"), (0.1, "0.1f"), (-2.5, "-2.5f"), (1 / 3, "0.33333334f")])
def test_float_literals(value, text):
    assert float_literal(value) == text


def test_infinite_constants_are_refused():
    with pytest.raises(ValueError, match="no fp32 constant"):
        float_literal(1e39)
