"""The pack of every rank: its own workers' streams.

Embedding tables and constants are whole in every rank's memory, for a token reads one row of a table, and constants are small. In
the artifact they lie once, behind the streams of rank 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from kogc.codegen.pack_index import Layout, PackIndex, pack_index
from kogc.codegen.pack_read import PackedWeights
from kogc.ir.program import Program, Schedule


def rank_schedules(program: Program, schedule: Schedule) -> tuple[Schedule, ...]:
    """What the workers of each rank do, numbered from 0 within their rank."""
    if program.ranks == 1:
        return (schedule,)
    workers = schedule.workers // program.ranks
    shares = (slice(rank * workers, (rank + 1) * workers) for rank in range(program.ranks))
    return tuple(_share(schedule, share) for share in shares)


def rank_indices(program: Program, schedule: Schedule, layout: Layout) -> tuple[PackIndex, ...]:
    """Where everything lies in the pack of each rank: behind the first rank's streams the tables and constants of all."""
    first, *others = (pack_index(program, own, layout) for own in rank_schedules(program, schedule))
    return (first, *map(_streams_alone, others))


def whole_index(program: Program, schedule: Schedule, layout: Layout) -> PackIndex:
    """The index that the kernel's plan is made from: every worker's stream as it lies in its rank's pack, and tables and
    constants as they lie in theirs. ``padding_bytes`` are those of all ranks."""
    if program.ranks == 1:
        return pack_index(program, schedule, layout)
    streams = tuple(stream for index in rank_indices(program, schedule, layout) for stream in index.streams)
    return replace(pack_index(program, schedule, layout), streams=streams)


def _streams_alone(index: PackIndex) -> PackIndex:
    end = index.embed_offset
    return replace(index, total_bytes=end, const_offset=end, embeds={}, consts={})


class RankedWeights:
    """A WeightSource over the packs of all ranks: each holds some rows of a matrix and zeros for the others."""

    def __init__(self, ranks: Iterable[PackedWeights]) -> None:
        self.ranks = tuple(ranks)

    def keys(self) -> Iterable[str]:
        return self.ranks[0].keys()

    def get(self, key: str) -> np.ndarray:
        """Raises KeyError for an unknown key."""
        first, *others = self.ranks
        if not first.is_dealt(key):
            return first.get(key)
        whole = first.get(key).copy()
        for other in others:
            bits = np.dtype(f"u{whole.dtype.itemsize}")
            np.bitwise_or(whole.view(bits), other.get(key).view(bits), out=whole.view(bits))
        return whole


def _share(schedule: Schedule, workers: slice) -> Schedule:
    work = tuple(tuple(tuple(turn[workers] for turn in stage) for stage in segment) for segment in schedule.work)
    return Schedule(workers.stop - workers.start, schedule.tile_rows, work)
