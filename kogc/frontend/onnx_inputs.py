"""What the inputs and outputs of an ONNX decode step are for."""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from kogc.frontend.errors import FrontendError
from kogc.frontend.onnx_file import OnnxFile

_SIGNATURE = "int64 token [T] and position [T] and float caches in, logits [T, V] and the new caches out"
_INTEGERS, _FLOATS = (6, 7), (1, 10, 11, 16)
#: Tokens of a step that takes any number.
STEP_TOKENS = 4


@dataclass(frozen=True)
class StepInputs:
    """Graph inputs by what they are for; ``position`` and ``mask`` (which tokens there are) may be missing where the caches' length
    tells it. ``grows`` is the axis of the positions so far in every cache, None where the caches have a fixed length."""

    token: onnx.ValueInfoProto
    position: onnx.ValueInfoProto | None
    mask: onnx.ValueInfoProto | None
    caches: tuple[onnx.ValueInfoProto, ...]
    grows: tuple[int, ...] | None

    @property
    def batched(self) -> bool:
        """Whether there is a batch axis, which is taken to be 1."""
        return len(sizes(self.token)) == 2


def read_inputs(file: OnnxFile) -> StepInputs:
    """Raises FrontendError for inputs that are no decode step's."""
    integers = [one for one in file.inputs if one.type.tensor_type.elem_type in _INTEGERS]
    caches = tuple(one for one in file.inputs if one.type.tensor_type.elem_type in _FLOATS)
    mask = next((one for one in integers if "mask" in one.name and len(sizes(one)) == 2), None)
    position = next((one for one in integers if "position" in one.name), None)
    others = [one for one in integers if one is not position and one is not mask]
    grows = _growing_axes(file, caches)
    if grows is None and position is None and len(others) == 2:
        position = others.pop()
    complete = position is not None and mask is None or grows is not None
    known = len(integers) + len(caches) == len(file.inputs) and caches and len(file.outputs) == 1 + len(caches)
    if not known or not complete or len(others) != 1:
        listed = ", ".join(one.name for one in file.inputs)
        raise FrontendError(f"{file.path} takes {listed or 'nothing'} and gives {len(file.outputs)} results, expected {_SIGNATURE}")
    for one in file.inputs:
        if any(size is not None and size < 1 for size in sizes(one)):
            shape = tuple(size or "?" for size in sizes(one))
            raise FrontendError(f"{file.path}: input {one.name} has the shape {shape}, expected {_SIGNATURE}")
    return StepInputs(others[0], position, mask, caches, grows)


def sizes(value: onnx.ValueInfoProto) -> tuple[int | None, ...]:
    """The shape, None where it is open."""
    return tuple(size.dim_value or None for size in value.type.tensor_type.shape.dim)


def _growing_axes(file: OnnxFile, caches: tuple[onnx.ValueInfoProto, ...]) -> tuple[int, ...] | None:
    """Of a cache with open sizes the last one counts positions; another one in front is the batch."""
    axes = tuple(max((axis for axis, size in enumerate(sizes(cache)) if size is None), default=None) for cache in caches)
    if all(axis is None for axis in axes):
        return None
    for cache, axis in zip(caches, axes, strict=True):
        if axis is None or any(size is None for size in sizes(cache)[1:axis]):
            shape = ", ".join(str(size or "?") for size in sizes(cache))
            raise FrontendError(f"{file.path}: cache {cache.name} is [{shape}]; expected one open size besides the batch, the positions so far")
    return axes
