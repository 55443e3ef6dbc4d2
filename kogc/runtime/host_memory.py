"""Memory of the host as a block: what both kinds of devices hand out where host and kernel see the same bytes."""

from __future__ import annotations

import numpy as np


class HostMemory:
    """``nbytes`` of the zeroed ``array`` (uint8), which the kernel finds at ``address``."""

    def __init__(self, array: np.ndarray, nbytes: int, address: int) -> None:
        self.nbytes, self.address = nbytes, address
        self._array: np.ndarray | None = array

    def view(self, dtype: type | np.dtype) -> np.ndarray:
        """The first ``nbytes`` as an array of ``dtype``."""
        assert self._array is not None
        return self._array[: self.nbytes].view(dtype)

    def read(self, dtype: type | np.dtype) -> np.ndarray:
        """A copy."""
        return self.view(dtype).copy()

    def clear(self) -> None:
        """Fill with zeros."""
        assert self._array is not None
        self._array.fill(0)

    def free(self) -> None:
        """Drop the memory; it goes when nobody views it any more."""
        self._array = None
