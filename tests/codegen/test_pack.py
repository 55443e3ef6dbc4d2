"""Packing: streams in consumption order, one rounding, nothing lost, and errors that name the tensor."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program_fixture import Shape, build, laneformer, llama, random_shapes, random_weights, rope_tables, weight_shapes

from kogc.codegen.pack import pack_stream
from kogc.codegen.pack_index import PackError, pack_index, weight_bytes
from kogc.codegen.pack_read import PackedWeights
from kogc.ir.passes.schedule import schedule
from kogc.ir.program import Program, unit_rows
from kogc.ir.types import NUMPY_DTYPES
from kogc.ir.weights import MappedWeights


def by_columns(block: np.ndarray) -> np.ndarray:
    """[units, arity, tile_rows, k] → per k the unit's weights side by side."""
    return block.transpose(0, 3, 1, 2)


def padded(block: np.ndarray) -> np.ndarray:
    """Rows as they are, and three zeros after each unit."""
    return np.pad(block.reshape(len(block), -1), ((0, 0), (0, 3)))


def packed(program: Program, weights, workers: int = 2, tile: int = 4, layout=by_columns, align: int = 1, progress=None):
    plan = schedule(program, workers, tile)
    out = np.full(pack_index(program, plan, layout, align).total_bytes, 0xAB, np.uint8)
    index = pack_stream(program, plan, weights, layout, out, rope_tables(program), align, progress)
    return out, index, PackedWeights(out, index, program, plan, layout), plan


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    return values.astype(np.float32).astype(NUMPY_DTYPES[dtype])


# ── the way there and back ──


@settings(max_examples=40, deadline=None)
@given(
    random_shapes(), st.integers(1, 7), st.sampled_from([1, 3, 4]), st.sampled_from(["fp32", "fp16", "bf16"]),
    st.sampled_from([by_columns, padded]), st.sampled_from([1, 64]),
)  # fmt: skip
def test_every_weight_comes_back_rounded_once(shape: Shape, workers: int, tile: int, dtype: str, layout, align: int):
    program = build(replace(shape, dtype=dtype))
    weights = random_weights(program)
    _, _, source, _ = packed(program, weights, workers, tile, layout, align)
    consts = {key for _, _, _, stage in program.instances() for const in stage.consts for key in const.keys}
    assert set(weights.keys()) | set(rope_tables(program)) == set(source.keys())
    for key in weights.keys():
        expected = weights.get(key) if key in consts else rounded(weights.get(key), dtype)
        assert source.get(key).dtype == expected.dtype
        np.testing.assert_array_equal(source.get(key), expected, err_msg=key)
    for key, table in rope_tables(program).items():
        np.testing.assert_array_equal(source.get(key), table.astype(np.float32))


@pytest.mark.parametrize("make", [llama, lambda: laneformer(early="present", bias=True, rope="interleaved")])
def test_a_stream_holds_the_units_in_the_order_of_the_schedule(make):
    """Read back by hand: instance by instance, run by run, unit by unit."""
    program, tile = make(), 4
    weights = random_weights(program)
    out, index, _, plan = packed(program, weights, 3, tile)
    for worker, (offset, length) in enumerate(index.streams):
        assert offset % 4096 == 0
        stream, at = out[offset : offset + length].view(np.float32), 0
        for segment, iteration, number, stage in program.instances():
            for run in plan.at(segment, number, iteration, worker).runs if stage.kind == "matvec" else ():
                part = stage.parts[run.part]
                for unit in range(run.first, run.first + run.count):
                    block = np.zeros((part.arity, tile, part.k), np.float32)
                    for slot, rows in enumerate(unit_rows(part, tile, unit)):
                        matrix = part.matrices[slot % len(part.matrices)]
                        stored = weights.get(matrix.key(iteration)).reshape(matrix.lanes, -1, matrix.k)
                        block[slot, rows >= 0] = stored[run.lane if matrix.lanes > 1 else 0, rows[rows >= 0] + matrix.rows_from]
                    laid = by_columns(block[None]).reshape(-1)
                    np.testing.assert_array_equal(stream[at : at + laid.size], laid)
                    at += laid.size
        assert at == stream.size


def test_slices_of_one_stored_tensor_are_read_once_and_put_together_again():
    program = _fused(llama(layers=2))
    shapes, asked = weight_shapes(program), []
    values = random_weights(program)

    def get(key):
        return lambda: asked.append(key) or values.get(key)

    _, _, source, _ = packed(program, MappedWeights({key: get(key) for key in shapes}))
    assert [key for key in asked if "qkv" in key] == ["layers.0.qkv.weight", "layers.1.qkv.weight"]
    np.testing.assert_array_equal(source.get("layers.1.qkv.weight"), values.get("layers.1.qkv.weight"))


def _fused(program: Program) -> Program:
    """q, k and v as slices of one tensor."""
    segment = program.segments[1]
    qkv, *others = segment.stages
    keys, parts, first = tuple(f"layers.{i}.qkv.weight" for i in range(segment.count)), [], 0
    for part in qkv.parts:
        parts.append(replace(part, matrices=(replace(part.matrices[0], keys=keys, rows_from=first),)))
        first += part.rows
    changed = replace(segment, stages=(replace(qkv, parts=tuple(parts)), *others))
    return replace(program, segments=(program.segments[0], changed, *program.segments[2:]))


# ── sizes and places ──


def test_padding_is_counted_and_zero():
    program = llama(dim=23, ffn=13, vocab=11)
    out, index, _, _ = packed(program, random_weights(program), workers=3, layout=padded, align=64)
    assert sum(length for _, length in index.streams) == weight_bytes(program) + index.padding_bytes
    for (offset, length), (after, _) in zip(index.streams, [*index.streams[1:], (index.embed_offset, 0)], strict=True):
        assert not out[offset + length : after].any()
    ends = [(index.embed_offset + program.vocab * 23 * 4, index.const_offset)]
    assert not any(out[low:high].any() for low, high in ends)


def test_units_are_aligned_when_the_target_asks():
    program = llama(dim=23, ffn=13)
    index = pack_index(program, schedule(program, 3, 4), by_columns, 64)
    assert all(size % 64 == 0 for segment in index.unit_bytes for stage in segment for size in stage)


def test_constants_are_kept_once_per_key_and_aligned():
    program = llama(layers=3)
    index = pack_index(program, schedule(program, 2, 4), by_columns)
    assert sorted(index.consts) == sorted({*index.consts}) and "rope.cos" in index.consts
    assert all(offset % 16 == 0 for offset in index.consts.values())
    assert len(set(index.consts.values())) == len(index.consts)


def test_a_worker_without_units_has_an_empty_stream():
    program = llama(layers=1, dim=4, heads=1, kv_heads=1, head_dim=4, ffn=4, vocab=5)
    _, index, _, _ = packed(program, random_weights(program), workers=7)
    assert 0 in [length for _, length in index.streams]


def test_a_memory_map_is_filled_in_place(tmp_path):
    program = llama()
    plan = schedule(program, 2, 4)
    total = pack_index(program, plan, by_columns).total_bytes
    out = np.memmap(tmp_path / "weights.bin", np.uint8, "w+", shape=(total,))
    pack_stream(program, plan, random_weights(program), by_columns, out, rope_tables(program))
    again, *_ = packed(program, random_weights(program))
    np.testing.assert_array_equal(out, again)


def test_progress_rises_to_the_whole():
    program, told = laneformer(), []
    _, index, _, _ = packed(program, random_weights(program), progress=lambda done, total: told.append((done, total)))
    done = [now for now, _ in told]
    assert done == sorted(done) and told[-1] == (index.total_bytes, index.total_bytes)


# ── rounding and refusals ──


def changed(program: Program, key: str, change) -> MappedWeights:
    values = {name: random_weights(program).get(name) for name in weight_shapes(program)}
    values[key] = change(values[key].copy())
    return MappedWeights(values)


def put(value):
    def change(array):
        array.reshape(-1)[-1] = value
        return array

    return change


def test_halfway_cases_round_to_even_and_only_once():
    """1 + 2⁻¹¹ is halfway between two fp16 numbers; a detour through another format would move it."""
    program = llama(dtype="fp16")
    for value, kept in ((1 + 2**-11, 1.0), (1 + 2**-11 + 2**-20, 1 + 2**-10), (1 + 3 * 2**-11, 1 + 2**-9)):
        _, _, source, _ = packed(program, changed(program, "head.weight", put(np.float32(value))))
        assert source.get("head.weight").reshape(-1)[-1] == kept


def test_sixteen_bit_sources_are_kept_bit_for_bit_or_rounded_from_their_exact_value():
    for stored in (np.float16, ml_dtypes.bfloat16):
        for dtype in ("fp32", "fp16", "bf16"):
            program = llama(dtype=dtype)
            weights = random_weights(program)
            narrow = MappedWeights({key: weights.get(key).astype(stored) for key in weights.keys()})
            _, _, source, _ = packed(program, narrow)
            np.testing.assert_array_equal(source.get("head.weight"), rounded(narrow.get("head.weight"), dtype))


@pytest.mark.parametrize("key", ["head.weight", "embed.weight", "layers.1.up.weight"])
def test_what_does_not_fit_fp16_names_the_tensor(key: str):
    program = llama(dtype="fp16")
    with pytest.raises(PackError, match=f"weight {key} holds 70000, which does not fit fp16"):
        packed(program, changed(program, key, put(7e4)))


def test_gate_and_up_may_come_in_different_dtypes():
    program = llama(dtype="bf16")
    weights = changed(program, "layers.0.up.weight", lambda a: a.astype(np.float16))
    _, _, source, _ = packed(program, weights)
    for key in ("layers.0.up.weight", "layers.0.gate.weight"):
        np.testing.assert_array_equal(source.get(key), rounded(weights.get(key), "bf16"))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("key", ["head.weight", "embed.weight", "layers.1.attention_norm.weight"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_numbers_that_are_not_finite_name_the_tensor(key: str, value: float, dtype: str):
    program = llama(dtype=dtype)
    with pytest.raises(PackError, match=f"{key} holds NaN or infinity"):
        packed(program, changed(program, key, put(value)))


def test_missing_and_misshapen_tensors_are_named_with_both_shapes():
    program = laneformer(lanes=2, dim=24, ffn=40)
    values = {key: random_weights(program).get(key) for key in weight_shapes(program)}
    with pytest.raises(PackError, match="weight layers.2.m.weight is missing"):
        packed(program, MappedWeights({key: value for key, value in values.items() if key != "layers.2.m.weight"}))
    with pytest.raises(PackError, match=r"weight layers.0.gate.weight has shape \[2, 20, 23\], expected \[2, 20, 24\]"):
        packed(program, changed(program, "layers.0.gate.weight", lambda a: a[:, :, 1:]))
    with pytest.raises(PackError, match=r"weight layers.0.ffn_norm.weight has shape \[23\], expected \[24\]"):
        packed(program, changed(program, "layers.0.ffn_norm.weight", lambda a: a[1:]))
    plan = schedule(program, 2, 4)
    out = np.zeros(pack_index(program, plan, by_columns).total_bytes, np.uint8)
    with pytest.raises(PackError, match="position table rope.cos is missing"):
        pack_stream(program, plan, random_weights(program), by_columns, out, {})


def test_too_small_a_buffer_and_an_odd_dtype_are_refused():
    program = llama()
    plan = schedule(program, 2, 4)
    with pytest.raises(ValueError, match="the pack needs"):
        pack_stream(program, plan, random_weights(program), by_columns, np.zeros(10, np.uint8), {})
    with pytest.raises(PackError, match="not fp64"):
        packed(replace(program, dtype="fp64"), random_weights(program))
