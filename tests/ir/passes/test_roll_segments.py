"""Finding loops: least code first, and loops cut where their reads follow no rule."""

import pytest
from decode_builder import Graphs
from plan_check import assert_levels_agree

from kogc.ir.passes.roll_segments import Span, find_spans


def spans(text, layers=None):
    return [(s.first, s.period, s.count) for s in find_spans(text, layers or [None] * len(text))]


@pytest.mark.parametrize(
    ("stages", "found"),
    [
        ("E" + "abc" * 5 + "H", [(0, 1, 1), (1, 3, 5), (16, 1, 1)]),
        ("abab", [(0, 2, 2)]),
        ("aaaa", [(0, 1, 4)]),
        ("abc", [(0, 3, 1)]),
        ("", []),
        # two kinds of layer in turn are one loop over both
        ("E" + "abxb" * 4, [(0, 1, 1), (1, 4, 4)]),
    ],
)
def test_spans(stages, found):
    assert spans(stages) == found


def test_a_loop_may_begin_inside_a_layer_when_that_saves_code():
    found = spans("EAtoGd" + "BtoGd" + "Btogd" + "Atogd" * 2 + "H")
    assert [count for _, _, count in found] == [1, 2, 1, 2, 1]
    assert sum(period for _, period, _ in found) == 17


def test_single_stages_of_one_layer_form_one_span():
    assert spans("EabH", [None, "layers.0", "layers.0", None]) == [(0, 1, 1), (1, 2, 1), (3, 1, 1)]


def test_a_deep_sequence_is_found_quickly():
    assert spans("E" + "abcde" * 126 + "HS") == [(0, 1, 1), (1, 5, 126), (631, 2, 1)]


def test_a_span_is_cut_between_iterations():
    assert Span(3, 5, 4).cut(1) == (Span(3, 5, 1), Span(8, 5, 3))


@pytest.mark.parametrize(
    ("sources", "counts"),
    [
        ([0, 0, 0, 0], [1, 3]),  # layer 0 reads its own rows, not a buffer
        ([0, 0, 1, 2, 3], [1, 4]),
        ([0, 0, 0, 1, 2, 3], [1, 1, 4]),  # the first read is peeled off, then the rest keeps one distance
        ([0, 0, 1, 0, 1, 1], [1, 2, 1, 2]),  # 0 1 | 0 | 1 1: no rule holds throughout
        ([0, 0, 1, 2, 3, 3, 3], [1, 4, 2]),
    ],
)
def test_reads_that_follow_no_rule_cut_the_loop(sources, counts):
    program = assert_levels_agree(Graphs.skips(sources))
    assert [s.count for s in program.segments if s.name.startswith("layers")] == counts
