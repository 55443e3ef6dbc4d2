"""Weight sources that read lazily, and the checks every tensor passes on its way in."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping

import numpy as np
import torch

from kogc.frontend.errors import FrontendError
from kogc.frontend.import_fx import DTYPE_NAMES, to_numpy
from kogc.ir.types import FLOAT_DTYPES, NUMPY_DTYPES
from kogc.ir.weights import WeightSource

#: Values looked at together when searching for NaN: bounds the extra memory to some megabytes.
_CHECK_CHUNK = 1 << 20
_EXPONENTS = {"float16": np.uint16(0x7C00), "bfloat16": np.uint16(0x7F80)}
#: Tensors old tools saved beside the weights although they follow from the configuration.
_DERIVED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.masked_bias")


def check_weights(
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    where: str,
    ignored: Iterable[str] = (),
) -> None:
    """Compare the tensors of a file with those a model needs.

    Args:
        expected: name → shape the model needs.
        found: name → shape in the file.
        where: the file, for messages.
        ignored: names that may be in the file without being needed (a tied head).

    Raises:
        FrontendError: the first missing, unexpected or wrongly shaped tensor, and how many more there are.
    """
    for name, shape in expected.items():
        if name in found and tuple(found[name]) != tuple(shape):
            raise FrontendError(
                f"{where}: tensor {name} has shape {list(found[name])}, the configuration needs {list(shape)}"
            )
    missing = [name for name in expected if name not in found]
    if missing:
        raise FrontendError(f"{where}: tensor {missing[0]} is missing{_more(missing)}; the file does not fit its configuration")
    ignored = set(ignored)
    extra = [n for n in found if n not in expected and n not in ignored and not n.endswith(_DERIVED_SUFFIXES)]
    if extra:
        raise FrontendError(f"{where}: tensor {extra[0]} is unexpected{_more(extra)}; the configuration has no use for it")


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


class CheckedWeights:
    """Wraps a source: every tensor is checked for its shape and for NaN and Inf when it is first read."""

    def __init__(self, source: WeightSource, expected: Mapping[str, tuple[int, ...]], where: str) -> None:
        self._source = source
        self._expected = expected
        self._where = where
        self._checked: set[str] = set()

    def keys(self) -> Iterable[str]:
        return self._expected.keys()

    def get(self, key: str) -> np.ndarray:
        """The values. Raises FrontendError naming the tensor when they are not finite or not as many as expected."""
        if key not in self._expected:
            raise KeyError(key)
        value = self._source.get(key)
        if key not in self._checked:
            self._check(key, value)
            self._checked.add(key)
        return value

    def _check(self, key: str, value: np.ndarray) -> None:
        if value.shape != tuple(self._expected[key]):
            raise FrontendError(f"{self._where}: tensor {key} has shape {list(value.shape)}, expected {list(self._expected[key])}")
        bad, first = 0, None
        rows = max(1, _CHECK_CHUNK // max(1, math.prod(value.shape[1:])))
        for start in range(0, len(value), rows):
            part = value[start : start + rows]
            finite = _finite(part)
            if not finite.all():
                bad += int(finite.size - finite.sum())
                if first is None:
                    place = np.argwhere(~finite)[0]
                    first = [int(place[0]) + start, *map(int, place[1:])], float(part[tuple(place)])
        if first:
            raise FrontendError(f"{self._where}: tensor {key} holds {bad} NaN or infinite values, the first ({first[1]}) at {first[0]}")


def _finite(values: np.ndarray) -> np.ndarray:
    """``np.isfinite``; for half types by their exponent bits, which is many times faster."""
    exponent = _EXPONENTS.get(values.dtype.name)
    if exponent is None:
        return np.isfinite(values)
    return (np.ascontiguousarray(values).view(np.uint16) & exponent) != exponent


class TorchWeights:
    """Tensors that PyTorch holds or maps from a file, handed out without copying where the device allows."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], where: str) -> None:
        self._tensors = tensors
        self._where = where

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def get(self, key: str) -> np.ndarray:
        """The values. Raises FrontendError for a tensor without values (meta device)."""
        tensor = self._tensors[key]
        if tensor.is_meta:
            raise FrontendError(f"{self._where}: tensor {key} is on the meta device and has no values; load weights first")
        return to_numpy(tensor)


class MissingWeights:
    """Stands for weights nobody gave: shapes are known, reading is an error."""

    def __init__(self, keys: Iterable[str], where: str) -> None:
        self._keys = tuple(keys)
        #: What to say to somebody who wants the weights.
        self.problem = f"{where} has no weights; ask for random ones (--random-weights), or compile without (--no-weights)"

    def keys(self) -> Iterable[str]:
        return self._keys

    def get(self, key: str) -> np.ndarray:
        raise FrontendError(self.problem)


class RandomWeights:
    """Seeded random values, each tensor made when it is asked for: the same seed, name and shape give the same values.

    Matrices are normal with standard deviation 1/√K (K = last axis), so that activations keep their size through any
    depth; norm scales are 1, biases are small. Made by tiling one random block from an offset that hangs on the
    name, at the speed of memory. The block's length is prime, so rows of a matrix never line up with it.
    """

    _BLOCK = 4_194_301

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: str = "fp16", seed: int = 0) -> None:
        if dtype not in FLOAT_DTYPES:
            raise ValueError(f"dtype is {dtype!r}, expected one of {', '.join(FLOAT_DTYPES)}")
        self._shapes = shapes
        self._dtype = NUMPY_DTYPES[dtype]
        self._seed = seed
        self._blocks: dict[float, np.ndarray] = {}

    def keys(self) -> Iterable[str]:
        return self._shapes.keys()

    def get(self, key: str) -> np.ndarray:
        shape = self._shapes[key]
        if key.endswith((".scale", "norm.weight")) or (len(shape) == 1 and key.endswith(".weight")):
            return np.ones(shape, self._dtype)
        block = self._block(shape[-1] ** -0.5)
        offset = int.from_bytes(hashlib.blake2b(f"{self._seed}\0{key}".encode(), digest_size=8).digest(), "little") % len(block)
        out = np.empty(math.prod(shape), self._dtype)
        at = 0
        while at < len(out):
            piece = block[offset : offset + len(out) - at]
            out[at : at + len(piece)] = piece
            at, offset = at + len(piece), 0
        return out.reshape(shape)

    def _block(self, scale: float) -> np.ndarray:
        """The random block at one standard deviation, in the stored dtype."""
        if scale not in self._blocks:
            normal = np.random.Generator(np.random.PCG64(self._seed)).standard_normal(self._BLOCK, np.float32)
            self._blocks[scale] = (normal * np.float32(scale)).astype(self._dtype)
        return self._blocks[scale]


def stored_dtype(dtypes: Iterable[torch.dtype], where: str) -> str:
    """The widest float type among the stored tensors. Raises FrontendError for one that cannot be a weight."""
    found = set(dtypes)
    for dtype in found:
        if DTYPE_NAMES.get(dtype) not in FLOAT_DTYPES:
            raise FrontendError(f"{where}: weights of type {dtype} are not supported; convert to fp32, fp16 or bf16")
    names = [DTYPE_NAMES[dtype] for dtype in found]
    if {"fp16", "bf16"} <= set(names):
        return "fp32" if "fp64" not in names else "fp64"
    return min(names, key=FLOAT_DTYPES.index)
