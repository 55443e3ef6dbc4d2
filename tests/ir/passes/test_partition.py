"""Partition: one rank is the identity, more are refused with a reason."""

import pytest
from decode_builder import laneformer, llama

from kogc.ir.passes.partition import lane_count, partition


def test_one_rank_owns_every_lane_of_the_unchanged_graph():
    graph = laneformer(lanes=2).graph
    dealt = partition(graph)
    assert dealt.ranks == 1
    assert dealt.graphs == (graph,)
    assert dealt.lanes == ((0, 1),)


def test_a_model_without_lanes_counts_as_one_lane():
    assert lane_count(llama().graph) == 1
    assert partition(llama().graph).lanes == ((0,),)


@pytest.mark.parametrize(
    ("ranks", "error", "message"),
    [
        (0, ValueError, "expected at least 1"),
        (3, ValueError, "3 ranks do not divide the 2 lanes of laneformer"),
        (2, NotImplementedError, "not built yet"),
    ],
)
def test_other_numbers_of_ranks_are_refused(ranks, error, message):
    with pytest.raises(error, match=message):
        partition(laneformer(lanes=2).graph, ranks)
