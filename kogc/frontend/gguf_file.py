"""The GGUF container: metadata and where each tensor lies, read straight from the file's header.

The ``gguf`` package's own reader makes a numpy view of every string, seconds for a usual vocabulary; only its
dequantisation is used, and only when a tensor is read.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kogc.frontend.errors import FrontendError

# GGUF value type → struct format; 8 is a string and 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)


@dataclass(frozen=True)
class GgufTensor:
    """One tensor: ``shape`` outermost axis first, ``kind`` the GGML type number, ``offset`` in bytes from the data's start."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class GgufFile:
    """Header of a GGUF file: ``metadata`` by key, ``tensors`` by name; ``read`` gives a tensor in floats.

    Raises:
        FrontendError: not GGUF, another version or byte order, or shorter than its header says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = np.memmap(path, np.uint8, "r")
        if bytes(self._bytes[:4]) != b"GGUF":
            raise FrontendError(f"{path} is not a GGUF file")
        self._at = 4
        (version,) = self._scalars("I", 1)
        if version not in _VERSIONS:
            raise FrontendError(f"{path} has GGUF version {version}, supported are {_VERSIONS} in little-endian order")
        tensors, entries = self._scalars("Q", 2)
        self.metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._string()
            (kind,) = self._scalars("I", 1)
            self.metadata[key] = self._value(kind)
        self.tensors = {tensor.name: tensor for tensor in (self._tensor() for _ in range(tensors))}
        alignment = int(self.metadata.get("general.alignment", 32))
        self._start = -(-self._at // alignment) * alignment
        for tensor in self.tensors.values():
            self._range(tensor)

    def read(self, name: str) -> np.ndarray:
        """The tensor's values: fp32, or fp16 and bf16 as stored. Raises FrontendError for an unknown quantisation."""
        import gguf
        import ml_dtypes

        tensor = self.tensors[name]
        start, end, kind, row_bytes = self._range(tensor)
        data = self._bytes[start:end]
        plain = {
            gguf.GGMLQuantizationType.F32: np.dtype("<f4"),
            gguf.GGMLQuantizationType.F16: np.dtype("<f2"),
            gguf.GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
        }
        if kind in plain:
            return data.view(plain[kind]).reshape(tensor.shape)
        try:
            return gguf.quants.dequantize(data.reshape(*tensor.shape[:-1], row_bytes), kind)
        except NotImplementedError as error:
            raise FrontendError(f"{self.path}: tensor {name} is quantised as {kind.name}, which is not supported") from error

    def _range(self, tensor: GgufTensor) -> tuple[int, int, Any, int]:
        """First byte, end, GGML type and bytes of a row of the last axis."""
        import gguf

        try:
            kind = gguf.GGMLQuantizationType(tensor.kind)
        except ValueError as error:
            raise FrontendError(f"{self.path}: tensor {tensor.name} has the unknown GGML type {tensor.kind}") from error
        block, size = gguf.GGML_QUANT_SIZES[kind]
        if not tensor.shape or tensor.shape[-1] % block:
            raise FrontendError(f"{self.path}: tensor {tensor.name} {list(tensor.shape)} does not divide into blocks of {block}")
        row_bytes = tensor.shape[-1] // block * size
        start = self._start + tensor.offset
        end = start + row_bytes * int(np.prod(tensor.shape[:-1], dtype=np.int64))
        if end > len(self._bytes):
            raise FrontendError(f"{self.path} is truncated: it has {len(self._bytes)} bytes, tensor {tensor.name} ends at {end}")
        return start, end, kind, row_bytes

    # ── header ──

    def _take(self, count: int) -> memoryview:
        if count < 0 or self._at + count > len(self._bytes):
            raise FrontendError(f"{self.path} is truncated: its header does not end within {len(self._bytes)} bytes")
        data = memoryview(self._bytes)[self._at : self._at + count]
        self._at += count
        return data

    def _scalars(self, code: str, count: int) -> tuple:
        return struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(f"<{code}")))

    def _string(self) -> str:
        (length,) = self._scalars("Q", 1)
        return bytes(self._take(length)).decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            (inner,) = self._scalars("I", 1)
            (count,) = self._scalars("Q", 1)
            if inner in _SCALARS:
                return list(self._scalars(_SCALARS[inner], count))
            return [self._value(inner) for _ in range(count)]
        if kind not in _SCALARS:
            raise FrontendError(f"{self.path} is damaged: unknown metadata type {kind} at byte {self._at}")
        return self._scalars(_SCALARS[kind], 1)[0]

    def _tensor(self) -> GgufTensor:
        name = self._string()
        (dimensions,) = self._scalars("I", 1)
        shape = self._scalars("Q", dimensions)
        (kind,) = self._scalars("I", 1)
        (offset,) = self._scalars("Q", 1)
        return GgufTensor(name, tuple(reversed(shape)), kind, offset)
