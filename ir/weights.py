"""Where weight values come from: a lazy, named source, so that no pass needs all weights in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import numpy as np


class WeightSource(Protocol):
    """Named weights, each read when asked for."""

    def keys(self) -> Iterable[str]: ...

    def get(self, key: str) -> np.ndarray:
        """The values in their stored dtype (fp32, fp16, bfloat16 by ml_dtypes). Raises KeyError for an unknown key."""
        ...


class MappedWeights:
    """Weights held in, or made on demand by, a mapping: an array or a function without arguments per key."""

    def __init__(self, values: Mapping[str, np.ndarray | Callable[[], np.ndarray]]) -> None:
        self._values = values

    def keys(self) -> Iterable[str]:
        return self._values.keys()

    def get(self, key: str) -> np.ndarray:
        value = self._values[key]
        return value() if callable(value) else value
