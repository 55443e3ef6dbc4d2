"""Which values of the knobs to keep: coordinate descent over measured speeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from kogc.errors import KernelStalled, KogcError, MachineMismatch, NumericError, ToolchainError
from kogc.tune_knobs import Values


class ResultsDiffer(KogcError):
    """A candidate does not compute what the original computes, bit by bit."""


#: What makes a candidate one to skip: it does not build (or spills), does not fit here, or does not work.
_UNUSABLE = (ToolchainError, MachineMismatch, KernelStalled, NumericError, ResultsDiffer)


@dataclass(frozen=True)
class Comparison:
    """Tokens per second of two kernels that ran in turns, an odd number of times each."""

    base: tuple[float, ...]
    candidate: tuple[float, ...]

    @property
    def base_tok_s(self) -> float:
        """The median of the base's runs."""
        return median(self.base)

    @property
    def tok_s(self) -> float:
        """The median of the candidate's runs."""
        return median(self.candidate)

    @property
    def ratio(self) -> float:
        """How many times as fast as the base the candidate is."""
        return self.tok_s / self.base_tok_s

    @property
    def spread(self) -> float:
        """How far runs of the same kernel lie apart: the larger of the two ranges, as a share of the base's speed."""
        return max(max(runs) - min(runs) for runs in (self.base, self.candidate)) / self.base_tok_s

    @property
    def faster(self) -> bool:
        """Whether the candidate is faster by more than the spread."""
        return self.ratio - 1 > self.spread

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "base_tok_s": self.base_tok_s, "tok_s": self.tok_s, "ratio": self.ratio, "spread": self.spread,
            "base_runs_tok_s": list(self.base), "runs_tok_s": list(self.candidate),
        }  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """One value of one knob, held against the best so far. ``comparison`` is None when it was skipped, ``note`` says why."""

    knob: str
    value: int
    comparison: Comparison | None
    note: str | None = None

    @property
    def kept(self) -> bool:
        return self.comparison is not None and self.comparison.faster

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        speeds = self.comparison.to_json() if self.comparison else {}
        return {"knob": self.knob, "value": self.value, "kept": self.kept, "note": self.note, **speeds}


@dataclass(frozen=True)
class Found:
    """What the search led to. ``final``: the best ``values`` held against those at the start, None when these are the best."""

    values: Values
    trials: tuple[Trial, ...]
    final: Comparison | None

    @property
    def better(self) -> bool:
        """Whether ``values`` are faster than those at the start."""
        return self.final is not None and self.final.faster


#: ``(base, candidate) → speeds``; raises one of ``_UNUSABLE`` for a candidate to skip.
Compare = Callable[[Values, Values], Comparison]


def descend(knobs: Mapping[str, Sequence[int]], start: Values, compare: Compare) -> Found:
    """Try the values of one knob after the other, each against the best so far, and keep what is faster.

    The best of many noisy figures is partly luck, so at the end it is measured once more, against the start.
    """
    best, trials = dict(start), []
    for knob, values in knobs.items():
        for value in values:
            if value == start[knob]:
                continue
            trials.append(_try(knob, value, best, compare))
            if trials[-1].kept:
                best[knob] = value
    return Found(best, tuple(trials), compare(start, best) if best != dict(start) else None)


def _try(knob: str, value: int, best: Values, compare: Compare) -> Trial:
    try:
        return Trial(knob, value, compare(dict(best), {**best, knob: value}))
    except _UNUSABLE as error:
        return Trial(knob, value, None, str(error))
