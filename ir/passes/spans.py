"""Element intervals of a buffer by worker, as arrays: who makes or needs what, for all workers at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


class PlanError(ValueError):
    """A schedule or sync plan that cannot work. The message names stage, worker, buffer, write and what to fix."""


@dataclass(frozen=True)
class Spans:
    """Span i says: worker ``worker[i]`` owns or reads the elements ``low[i]`` … ``high[i]`` (exclusive) of one write.

    Elements are counted flat over a buffer: lane · width + element.
    """

    worker: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @staticmethod
    def of(worker, low, high) -> Spans:
        return Spans(*(np.asarray(a, np.int64).reshape(-1) for a in (worker, low, high)))

    @staticmethod
    def joined(parts: list[Spans]) -> Spans:
        if not parts:
            return Spans.of([], [], [])
        return Spans(*(np.concatenate([getattr(p, name) for p in parts]) for name in ("worker", "low", "high")))

    def __len__(self) -> int:
        return len(self.worker)

    def sorted(self) -> Spans:
        """In element order, neighbours of the same worker merged."""
        order = np.argsort(self.low, kind="stable")
        worker, low, high = self.worker[order], self.low[order], self.high[order]
        starts = np.ones(len(order), bool)
        starts[1:] = (worker[1:] != worker[:-1]) | (low[1:] != high[:-1])
        ends = np.roll(starts, -1)
        return Spans(worker[starts], low[starts], high[ends])

    def of_worker(self, worker: int) -> tuple[tuple[int, int], ...]:
        chosen = self.worker == worker
        return tuple(zip(self.low[chosen].tolist(), self.high[chosen].tolist(), strict=True))


def expand(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For items with ``counts[i]`` members each: (item, number within the item) of every member."""
    item = np.repeat(np.arange(len(counts)), counts)
    return item, np.arange(len(item)) - np.repeat(np.cumsum(counts) - counts, counts)


def meetings(reads: Spans, owned: Spans) -> tuple[np.ndarray, np.ndarray]:
    """(index into reads, index into owned) of every pair that shares elements. ``owned`` is sorted and disjoint."""
    first = np.searchsorted(owned.high, reads.low, "right")
    last = np.searchsorted(owned.low, reads.high, "left")
    read, offset = expand(np.maximum(last - first, 0))
    return read, first[read] + offset


def needs(reads: Spans, owned: Spans, workers: int) -> np.ndarray:
    """bool [reader, owner]: who needs something of whom."""
    touched, which = np.zeros((0, workers), bool), np.zeros(0, np.int64)
    if len(reads):
        asked, which = _distinct(reads)
        touched = np.zeros((len(asked), workers), bool)
        read, own = meetings(asked, owned)
        touched[read, owned.worker[own]] = True
    result = np.zeros((workers, workers), bool)
    order = np.argsort(reads.worker, kind="stable")
    readers, starts = np.unique(reads.worker[order], return_index=True)
    if len(readers):
        result[readers] = np.logical_or.reduceat(touched[which[order]], starts)
    return result


def missing(reads: Spans, owned: Spans) -> int | None:
    """Index of a read span that touches an element nobody owns, or None."""
    if not len(reads):
        return None
    asked, which = _distinct(reads)
    read, own = meetings(asked, owned)
    shared = np.minimum(asked.high[read], owned.high[own]) - np.maximum(asked.low[read], owned.low[own])
    covered = np.bincount(read, shared, len(asked))
    holes = np.flatnonzero((covered != asked.high - asked.low)[which])
    return int(holes[0]) if len(holes) else None


def _distinct(reads: Spans) -> tuple[Spans, np.ndarray]:
    """The different intervals, and for every read span which of them it is: most readers want the same vector."""
    _, picked, which = np.unique(reads.low * 2**32 + reads.high, return_index=True, return_inverse=True)
    return Spans(reads.worker[picked], reads.low[picked], reads.high[picked]), which.reshape(-1)
