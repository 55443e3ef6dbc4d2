"""Types of IR values: a shape whose token axis is symbolic, and a storage dtype."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

#: The token axis of a decode step. A step processes ``step_tokens`` tokens; the decode graph holds for any number.
T = "T"
Dim = int | str

NUMPY_DTYPES: dict[str, np.dtype] = {
    "fp64": np.dtype(np.float64),
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "int64": np.dtype(np.int64),
    "int32": np.dtype(np.int32),
    "bool": np.dtype(np.bool_),
    "complex64": np.dtype(np.complex64),
    "complex128": np.dtype(np.complex128),
}
FLOAT_DTYPES = ("fp64", "fp32", "fp16", "bf16")


@dataclass(frozen=True)
class TensorType:
    """Shape and dtype of a value. ``shape`` may contain the symbol ``T`` (tokens of the step)."""

    shape: tuple[Dim, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in NUMPY_DTYPES:
            raise ValueError(f"unknown dtype {self.dtype!r}; known: {', '.join(NUMPY_DTYPES)}")

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    @staticmethod
    def parse(text: str) -> TensorType:
        """Read back what ``str`` wrote, e.g. ``fp32[T, 8, 64]``."""
        dtype, _, rest = text.partition("[")
        dims = [d.strip() for d in rest.rstrip("]").split(",") if d.strip()]
        return TensorType(tuple(d if d == T else int(d) for d in dims), dtype)

    @property
    def numpy_dtype(self) -> np.dtype:
        return NUMPY_DTYPES[self.dtype]

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOAT_DTYPES

    def concrete(self, tokens: int) -> tuple[int, ...]:
        """The shape with the token axis set to ``tokens``."""
        return tuple(tokens if d == T else int(d) for d in self.shape)

    @property
    def elements_per_token(self) -> int:
        """Number of elements, the token axis counted as 1."""
        return int(np.prod(self.concrete(1), dtype=np.int64))
