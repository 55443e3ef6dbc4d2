"""Attention masks, classified by their values: causal, or causal with a window."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kogc.ir.passes.recognize.errors import NotUnderstood
from kogc.ir.passes.recognize.position import PositionFunctions

#: An additive mask hides a slot with anything below this; 0 shows it.
HIDDEN_BELOW = -1e4
#: Up to this capacity every row of a mask is checked.
EXHAUSTIVE = 1024


def visible_by(mask: np.ndarray) -> np.ndarray:
    """Which slots a mask as scaled_dot_product_attention takes it shows: bool is itself, float is added to the scores."""
    if mask.dtype == bool:
        return mask
    mask = mask.astype(np.float64)
    if not np.all((mask == 0) | (mask <= HIDDEN_BELOW)):
        raise NotUnderstood("the attention mask holds values other than 0 and -inf (a position bias such as ALiBi is not supported)")
    return mask == 0


class Masks:
    """Classifies masks; masks that are computed alike are classified once."""

    def __init__(self, functions: PositionFunctions) -> None:
        self._functions = functions
        self._known: dict[tuple, int | None] = {}

    def window(self, name: str, rows: Callable[[np.ndarray], np.ndarray], how: object) -> int | None:
        """The window of the mask ``name``, None when every earlier position is visible.

        ``rows`` turns the value of ``name`` into bool [T, capacity], true where visible; ``how`` says which such function.
        Raises NotUnderstood for any other mask.
        """
        key = (self._functions.key(name), how)
        if key not in self._known:
            self._known[key] = self._classify(lambda positions: rows(self._functions.at(name, positions)))
        return self._known[key]

    def _classify(self, rows: Callable[[np.ndarray], np.ndarray]) -> int | None:
        capacity, tokens = self._functions.capacity, self._functions.tokens
        last = rows(np.full(tokens, capacity - 1))[0]
        window = int(last.sum())
        for positions in _batches(self._probes(window), tokens):
            age = positions[:, None] - np.arange(capacity)
            wrong = rows(positions) != ((age >= 0) & (age < window))
            if wrong.any():
                token, slot = np.argwhere(wrong)[0]
                raise NotUnderstood(
                    f"the attention mask is neither causal nor a causal window: position {positions[token]} "
                    f"{'hides' if age[token, slot] >= 0 else 'shows'} slot {slot} where a window of {window} would not"
                )
        return None if window == capacity else window

    def _probes(self, window: int) -> np.ndarray:
        capacity = self._functions.capacity
        if capacity <= EXHAUSTIVE:
            return np.arange(capacity)
        edges = [0, 1, capacity // 2, capacity - 2, capacity - 1, *(window + d for d in (-2, -1, 0, 1, 2))]
        spread = np.random.default_rng(0).integers(0, capacity, 64)
        return np.unique(np.clip([*edges, *spread], 0, capacity - 1))


def _batches(positions: np.ndarray, tokens: int):
    for start in range(0, len(positions), tokens):
        part = positions[start : start + tokens]
        yield np.concatenate([part, np.full(tokens - len(part), part[-1])])
