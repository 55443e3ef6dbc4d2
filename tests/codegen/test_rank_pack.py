"""Packs of several ranks: each holds its own workers' weights, and together they hold the model."""

from dataclasses import replace

import numpy as np
import pytest
from kernel_harness import rounded_weights
from program_fixture import laneformer, rope_tables

from kogc.codegen.layout import make_layout
from kogc.codegen.pack import pack_share, pack_stream
from kogc.codegen.pack_index import pack_index
from kogc.codegen.pack_read import PackedWeights
from kogc.codegen.rank_pack import RankedWeights, rank_indices, rank_schedules, whole_index
from kogc.codegen.render import render
from kogc.codegen.staging import make_staging
from kogc.codegen.tables import make_tables, sent_writes
from kogc.ir.passes.across_ranks import across_ranks
from kogc.ir.passes.schedule import schedule
from kogc.targets import load_target
from kogc.targets.cpu import stream_order

TILE, WORKERS = 4, 2


def program_on(ranks: int, dtype: str = "fp32"):
    program = replace(laneformer(lanes=4, heads=4, kv_heads=4, layers=3, delay=1, dtype=dtype), ranks=ranks)
    work = schedule(program, ranks * WORKERS, TILE)
    return across_ranks(program, work), work


def packs(program, work, weights):
    for rank, (index, own) in enumerate(zip(rank_indices(program, work, stream_order), rank_schedules(program, work), strict=True)):
        out = np.full(index.total_bytes, 0xAB, np.uint8)
        if rank == 0:
            pack_stream(program, own, weights, stream_order, out, rope_tables(program))
        else:
            pack_share(program, own, weights, stream_order, out, index)
        yield PackedWeights(out, index, program, own, stream_order)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_packs_together_hold_every_weight(ranks, dtype):
    program, work = program_on(ranks, dtype)
    weights = rounded_weights(program)
    read = RankedWeights(packs(program, work, weights))
    keys = [key for key in read.keys() if key not in rope_tables(program)]
    assert len(keys) > 10
    for key in keys:
        np.testing.assert_array_equal(read.get(key).astype(np.float32), weights.get(key), err_msg=key)


def test_a_matrix_with_lanes_lies_in_the_rank_of_each_lane_alone():
    program, work = program_on(2)
    first, second = packs(program, work, rounded_weights(program))
    key = next(part.matrices[0].keys[0] for _, _, _, stage in program.instances() for part in stage.parts if part.matrices and part.matrices[0].lanes == 4)
    assert first.get(key)[:2].any() and not first.get(key)[2:].any()
    assert second.get(key)[2:].any() and not second.get(key)[:2].any()


def test_ranks_stream_what_as_many_workers_of_one_rank_would():
    program, work = program_on(2)
    whole, parts = pack_index(program, work, stream_order), rank_indices(program, work, stream_order)
    assert [length for _, length in whole.streams] == [length for index in parts for _, length in index.streams]
    joined = whole_index(program, work, stream_order)
    assert joined.streams == tuple(stream for index in parts for stream in index.streams)
    assert (joined.consts, joined.embeds) == (parts[0].consts, parts[0].embeds)


def test_tables_and_constants_lie_once_behind_the_first_ranks_streams():
    program, work = program_on(4)
    first, *others = rank_indices(program, work, stream_order)
    assert first.total_bytes > first.const_offset > first.embed_offset
    assert all(index.total_bytes == index.embed_offset and not index.consts for index in others)


def test_a_rank_holds_its_own_lanes_caches():
    sizes = [make_layout(program_on(ranks)[0], ranks * WORKERS, TILE).kv_bytes for ranks in (1, 2, 4)]
    assert sizes[0] == 2 * sizes[1] == 4 * sizes[2]


def test_the_plan_says_which_ranks_read_what_is_sent():
    program, work = program_on(2)
    sending = [(stage, i) for _, i, _, stage in program.instances() if sent_writes(stage, i)]
    masks = {mask for stage, i in sending for mask in sent_writes(stage, i).values()}
    assert masks == {0, 0b11}, "in some iterations nobody reads the value"
    index = whole_index(program, work, stream_order)
    tables = make_tables(program, work, make_layout(program, work.workers, TILE), index)
    words = np.frombuffer(tables.data, np.int32)
    number, (segment, place) = next(
        (n, at) for n, at in enumerate((s, p) for s, one in enumerate(program.segments) for p, _ in enumerate(one.stages))
        if (stage := program.segments[at[0]].stages[at[1]]) and sent_writes(stage, 0) and not stage.consts and stage.kind == "matvec"
    )  # fmt: skip
    stage = program.segments[segment].stages[place]
    for iteration in range(program.segments[segment].count):
        facts = words[words[tables.shared + tables.first_instance[number] + iteration] :]
        assert facts[: len(sent_writes(stage, iteration))].tolist() == list(sent_writes(stage, iteration).values())


def test_feeds_of_machines_with_own_flags_name_places_in_the_ranks_own_caches():
    """What a rank streams of its lanes' caches lies where the other rank's lies in its own memory."""
    target = load_target("h200")
    program = replace(laneformer(lanes=4, heads=4, kv_heads=4, layers=3, delay=1), ranks=2)
    work = schedule(program, 2 * WORKERS, target.tile_rows)
    program = across_ranks(program, work)
    layout = make_layout(program, work.workers, target.tile_rows, tagged=True)
    staging = make_staging(program, work, target)
    tables = make_tables(program, work, layout, whole_index(program, work, target.layout), staging)
    words = np.frombuffer(tables.data, np.int32)
    feeds = [words[words[words[1] + worker] :] for worker in range(work.workers)]
    places = [[feed[1 + 10 * unit + 2 : 1 + 10 * unit + 6].tolist() for unit in range(feed[0])] for feed in feeds]
    assert places[0] == places[2] != places[1] == places[3]
    assert max(place[0] for worker in places for place in worker) < layout.kv_bytes


def test_kernels_of_one_rank_hold_nothing_of_ranks():
    target = load_target("cpu", simd="generic")
    sources = []
    for ranks in (1, 2):
        program, work = program_on(ranks)
        work = schedule(program, ranks * WORKERS, target.tile_rows)
        program = across_ranks(replace(program, ranks=ranks), work)
        sources.append(render(program, work, target, whole_index(program, work, target.layout)).source)
    for word in ("RANKS", "peers", "Sending", "sending", "DROPPED_SEND", "lane %"):
        assert word not in sources[0] and word in sources[1], word
