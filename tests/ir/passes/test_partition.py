"""Partition: lanes are dealt whole, and numbers of ranks that do not divide are refused with those that would."""

import pytest
from decode_builder import laneformer, llama

from kogc.ir.passes.partition import PartitionError, lane_count, partition


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_model_with_lanes_stays_as_it_is(ranks):
    graph = laneformer(lanes=4, heads=4, kv_heads=4).graph
    assert partition(graph, ranks) is graph


def test_a_model_without_lanes_counts_as_one_lane():
    assert lane_count(llama().graph) == 1 and lane_count(laneformer(lanes=2).graph) == 2


@pytest.mark.parametrize(
    ("lanes", "ranks", "message"),
    [
        (2, 0, "ranks is 0, expected at least 1"),
        (2, 3, "3 ranks do not divide the 2 lanes of laneformer; 1 or 2 would"),
        (4, 8, "8 ranks do not divide the 4 lanes of laneformer; 1, 2 or 4 would"),
    ],
)
def test_other_numbers_of_ranks_are_refused(lanes, ranks, message):
    with pytest.raises(PartitionError, match=message):
        partition(laneformer(lanes=lanes, heads=lanes, kv_heads=lanes).graph, ranks)
