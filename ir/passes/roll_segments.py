"""Which consecutive stages repeat: the loops that need the least code."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """``count`` repetitions of ``period`` stages, beginning with stage ``first``."""

    first: int
    period: int
    count: int

    @property
    def last(self) -> int:
        """Number of the first stage behind the span."""
        return self.first + self.period * self.count

    def cut(self, iteration: int) -> tuple[Span, Span]:
        """The span as two, the second beginning with ``iteration``."""
        head = Span(self.first, self.period, iteration)
        return head, Span(head.last, self.period, self.count - iteration)


def find_spans(signatures: Sequence[Hashable], layers: Sequence[str | None]) -> list[Span]:
    """Cover all stages with spans of equal signatures so that the written-out stages are fewest, then the spans.

    Stages that repeat nothing form spans of count 1, one for each layer name among ``layers``.
    """
    numbers: dict[Hashable, int] = {}
    ids = [numbers.setdefault(signature, len(numbers)) for signature in signatures]
    return _joined(_cheapest(ids), layers)


def _cheapest(ids: Sequence[int]) -> list[Span]:
    """Dynamic programming over prefixes; a cost is (stages written out, spans)."""
    total = len(ids)
    best: list[tuple[int, int]] = [(0, 0)] + [(total + 1, 0)] * total
    chosen: list[Span | None] = [None] * (total + 1)
    alike = _common_runs(ids)
    for first in range(total):
        options = [Span(first, 1, 1)]
        for period, length in enumerate(alike[first], start=1):
            options += (Span(first, period, count) for count in range(2, length // period + 2))
        for span in options:
            cost = (best[first][0] + span.period, best[first][1] + 1)
            if cost < best[span.last]:
                best[span.last], chosen[span.last] = cost, span
    spans, end = [], total
    while end:
        spans.append(chosen[end])
        end = chosen[end].first
    return spans[::-1]


def _common_runs(ids: Sequence[int]) -> list[list[int]]:
    """``runs[i][p - 1]``: for how many stages from i on stage j equals stage j + p."""
    total = len(ids)
    runs = [[0] * (total - first - 1) for first in range(total)]
    for period in range(1, total):
        length = 0
        for first in range(total - period - 1, -1, -1):
            length = length + 1 if ids[first] == ids[first + period] else 0
            runs[first][period - 1] = length
    return runs


def _joined(spans: Sequence[Span], layers: Sequence[str | None]) -> list[Span]:
    """Neighbouring single stages of one layer become one span."""
    joined: list[Span] = []
    for span in spans:
        before = joined[-1] if joined else None
        if before and span.count == before.count == 1 and layers[before.first] == layers[span.first]:
            joined[-1] = Span(before.first, before.period + span.period, 1)
        else:
            joined.append(span)
    return joined
