"""The accuracy gate's arithmetic: how far logits may be from a reference, and what of the next token follows from that."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Largest relative RMSE by storage dtype. Fixed, and never derived from an observed error.
LIMITS = {"fp32": 1e-4, "fp16": 5e-3, "bf16": 2e-2}
#: The next token must agree where the reference prefers it by more than this many limits (times the rms of the logits).
MARGIN_LIMITS = 6.0


@dataclass(frozen=True)
class Closeness:
    """How close some values are to their reference. ``rel_rmse`` = rms(error) / rms(reference)."""

    rel_rmse: float
    cosine: float

    def within(self, limit: float) -> bool:
        """Relative RMSE at most ``limit`` and cosine at least 1 − limit². Not a number is never within."""
        return self.rel_rmse <= limit and self.cosine >= 1 - limit**2


def closeness(values: np.ndarray, reference: np.ndarray) -> Closeness:
    """Compare two arrays of equal shape, in fp64. A reference of zeros allows zeros only."""
    if values.shape != reference.shape:
        raise ValueError(f"values have shape {values.shape}, their reference {reference.shape}")
    x, y = values.astype(np.float64).ravel(), reference.astype(np.float64).ravel()
    error, size = float(np.sqrt(np.mean((x - y) ** 2))), float(np.sqrt(np.mean(y * y)))
    if size == 0.0:
        return Closeness(0.0, 1.0) if error == 0.0 else Closeness(float("inf"), 0.0)
    lengths = float(np.linalg.norm(x) * np.linalg.norm(y))
    return Closeness(error / size, float(x @ y) / lengths if lengths else 0.0)


@dataclass(frozen=True)
class NextToken:
    """``checked`` positions have a clear enough margin in the reference; ``wrong`` are those of them (positions) where the
    largest logit is another one."""

    checked: int
    wrong: tuple[int, ...]


def next_tokens(logits: np.ndarray, reference: np.ndarray, limit: float) -> NextToken:
    """Compare the largest logits of [T, V] wherever the reference's margin exceeds 6 · limit · rms(its logits)."""
    reference = reference.astype(np.float64)
    second, first = np.partition(reference, -2, axis=-1)[:, -2:].T
    clear = first - second > MARGIN_LIMITS * limit * np.sqrt(np.mean(reference**2, axis=-1))
    differs = logits.argmax(-1) != reference.argmax(-1)
    return NextToken(int(clear.sum()), tuple(np.flatnonzero(clear & differs).tolist()))
