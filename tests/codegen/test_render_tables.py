"""The plan tables say what schedule, pack index and layout say; and memory is laid out without overlaps."""

import numpy as np
import pytest
from program_fixture import laneformer, llama

from kogc.codegen.layout import make_layout, numbered_stages
from kogc.codegen.pack_index import pack_index
from kogc.codegen.tables import make_tables, shares_once, shares_own, stage_caches
from kogc.ir.passes.schedule import schedule
from kogc.ir.passes.separate_combine import separate_combine
from kogc.targets.cpu import stream_order

PROGRAMS = {
    "llama": llama(bias=True),
    "laneformer": laneformer(window=5),
    "blocking sums": laneformer(early="present"),
    "head per lane": laneformer(head="vocab_parallel", vocab=54),
    "combined apart": separate_combine(laneformer(), 0),
}


class Cursor:
    """Reads a list of the plan as the kernel does."""

    def __init__(self, words, at):
        self.words, self.at = words, at

    def next(self):
        self.at += 1
        return int(self.words[self.at - 1])

    def wide(self):
        low = self.next() & 0xFFFFFFFF
        return self.next() << 32 | low

    def intervals(self):
        return tuple((self.next(), self.next()) for _ in range(self.next()))


def built(program, workers=3, tile_rows=8):
    plan = schedule(program, workers, tile_rows)
    layout = make_layout(program, workers, tile_rows)
    index = pack_index(program, plan, stream_order)
    tables = make_tables(program, plan, layout, index)
    return plan, layout, index, tables, np.frombuffer(tables.data, np.int32)


def instances(program, tables):
    for number, segment, stage in numbered_stages(program):
        for iteration in range(program.segments[segment].count):
            yield tables.first_instance[number] + iteration, segment, program.segments[segment].stages.index(stage), iteration, stage


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_work_reads_back_as_the_schedule(program):
    plan, _, _, tables, words = built(program)
    for at, segment, number, iteration, stage in instances(program, tables):
        for worker in range(plan.workers):
            expected = plan.at(segment, number, iteration, worker)
            cursor = Cursor(words, words[tables.work + at * plan.workers + worker])
            assert tuple(cursor.intervals() for _ in stage.operands) == expected.awaits
            if stage.kind == "sample":
                continue
            runs, shares = read_visits(cursor, stage)
            assert runs == [(r.lane, r.part, r.first, r.count) for r in expected.runs]
            assert sorted(shares) == sorted((s.output, s.lane, s.first, s.last) for s in expected.shares)


def read_visits(cursor, stage):
    runs, shares = [], []
    visits = cursor.next()
    if shares_once(stage):
        shares += [tuple(cursor.next() for _ in range(4)) for _ in range(cursor.next())]
    for _ in range(visits):
        lane = cursor.next()
        if shares_own(stage):
            for _ in range(cursor.next()):
                output, first, last = (cursor.next() for _ in range(3))
                shares.append((output, lane, first, last))
        runs += [(lane, *(cursor.next() for _ in range(3))) for _ in range(cursor.next())]
    return runs, shares


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_shared_facts_read_back(program):
    _, layout, index, tables, words = built(program)
    for at, _, _, iteration, stage in instances(program, tables):
        cursor = Cursor(words, words[tables.shared + at])
        assert [cursor.next() for _ in stage.consts] == [index.consts[const.key(iteration)] for const in stage.consts]
        keys = stage_caches(stage, iteration)
        assert [cursor.wide() for _ in keys] == [layout.caches[key] for key in keys]
        if stage.embed_table:
            assert cursor.wide() == index.embeds[stage.embed_table] * 4
        if stage.attention:
            assert cursor.next() == stage.attention.windows[iteration]


def test_streams_read_back():
    _, _, index, _, words = built(llama())
    cursor = Cursor(words, words[0])
    assert tuple((cursor.wide(), cursor.wide()) for _ in index.streams) == index.streams


def test_plan_grows_by_records_not_by_code():
    small, large = (len(built(llama(layers=n))[3].data) for n in (4, 32))
    assert large < 8.5 * small


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_exchange_regions_do_not_overlap(program):
    workers = 3
    layout = make_layout(program, workers, 8)
    regions = []
    for placed in layout.buffers:
        regions.append((placed.data, placed.data + placed.buffer.slots * layout.columns * placed.lanes * placed.pitch * 4))
        regions.append((placed.flags, placed.flags + workers * 64))
        assert placed.data % 64 == placed.flags % 64 == 0
        assert placed.pitch % 8 == 0 and (placed.pitch >= placed.buffer.width or placed.buffer.payload in ("cache", "best"))
    regions.sort()
    assert all(end <= begin for (_, end), (begin, _) in zip(regions, regions[1:]))
    assert regions[-1][1] <= layout.exchange_bytes


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_probes_follow_one_another(program):
    layout = make_layout(program, 2, 8)
    offset = 0
    for entry in layout.probes:
        assert entry.offset == offset
        offset += layout.columns * entry.lanes * entry.width
    assert offset == layout.probe_floats
    assert {entry.value for entry in layout.probes if entry.kind == "cache"} >= {"dot0"} or program is PROGRAMS["llama"]


def test_caches_follow_one_another():
    layout = make_layout(llama(dtype="fp16", capacity=33, head_dim=6), 2, 8)
    offsets = sorted(layout.caches.values())
    assert len(offsets) == 6 and all(offset % 64 == 0 for offset in offsets)
    assert all(b - a >= 2 * 33 * 6 * 2 for a, b in zip(offsets, [*offsets[1:], layout.kv_bytes]))
