"""``model.onnx``: a decode step as PyTorch would run it, one line of Python per ONNX node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from kogc.frontend.errors import FrontendError
from kogc.frontend.functional import CachesAsBuffers
from kogc.frontend.model_input import ModelInput, file_identity
from kogc.frontend.onnx_calls import compiled, plain_call
from kogc.frontend.onnx_file import OnnxFile
from kogc.frontend.onnx_growing import FixedLength
from kogc.frontend.onnx_inputs import STEP_TOKENS, StepInputs, read_inputs, sizes
from kogc.frontend.onnx_ops import DTYPES
from kogc.frontend.sources import CheckedWeights, stored_dtype

_TORCH = {"float32": torch.float32, "float16": torch.float16, "float64": torch.float64, "bfloat16": torch.bfloat16}


def load_onnx(path: Path, *, max_context: int | None = None) -> ModelInput:
    """Read a decode step with past caches as inputs and present ones as outputs, opset 17 or newer.

    Caches of fixed length are written at the tokens' positions; those that grow by the new token get ``max_context`` positions.

    Raises:
        FrontendError: damaged, another signature, or an operation that is not known.
    """
    file = OnnxFile(path)
    inputs = read_inputs(file)
    names = file.weights(inputs.token.name, [cache.name for cache in inputs.caches])
    step, tokens = (_fixed_step if inputs.grows is None else _growing_step)(file, inputs, names, max_context)
    module = CachesAsBuffers(step, _caches(inputs, max_context), None if tokens == STEP_TOKENS else tokens)
    weights = OnnxWeights(file, {f"step.{key}": name for key, name in step.keys.items()})
    expected = {key: tuple(file.tensors[name].shape) for key, name in weights.names.items()}
    return ModelInput(
        name=path.stem, module=module, weights=CheckedWeights(weights, expected, str(path)), config={}, tokenizer_json=None,
        chat_template=None, eos_ids=(), bos_id=None, context=max_context, identity=file_identity(*sorted(file.files)),
        dtype=stored_dtype((_TORCH[file.tensors[name].dtype.name] for name in names), str(path)) if names else "fp32",
    )  # fmt: skip


def _fixed_step(file: OnnxFile, inputs: StepInputs, names: list[str], max_context: int | None) -> tuple[OnnxStep, int]:
    """The step as it is, and its tokens."""
    step = OnnxStep(file, names, inputs.batched)
    constants = {name: value for name, value in file.tensors.items() if name not in names}
    arguments = [one.name for one in (inputs.token, inputs.position, *inputs.caches)] + names
    step.run = compiled(file.path, [plain_call(node, file.path) for node in file.nodes], arguments, file.outputs, constants)
    return step, sizes(inputs.token)[-1] or STEP_TOKENS


def _growing_step(file: OnnxFile, inputs: StepInputs, names: list[str], max_context: int | None) -> tuple[OnnxStep, int]:
    """The step over ``max_context`` positions, and its tokens."""
    if max_context is None:
        raise FrontendError(f"{file.path}: its caches grow, so that it does not say how many positions to compile for; choose with --max-context")
    tokens = sizes(inputs.token)[-1] or (STEP_TOKENS if max_context > STEP_TOKENS + 1 else 2)
    if tokens < 2 or max_context <= tokens + 1:
        few = f"a context of {max_context} was asked for, at least {tokens + 2} are needed"
        raise FrontendError(f"{file.path}: {few if tokens > 1 else 'takes one token; export it for any number of them'}")
    step, fixed = OnnxStep(file, names, inputs.batched), FixedLength(file, inputs, names, max_context, tokens)
    arguments = [inputs.token.name, fixed.position, *(cache.name for cache in inputs.caches), *names]
    step.run = compiled(file.path, fixed.calls, arguments, fixed.outputs, fixed.constants)
    return step, tokens


def _caches(inputs: StepInputs, max_context: int | None) -> list[Tensor]:
    grows = inputs.grows or (None,) * len(inputs.caches)
    shapes = [
        tuple(max_context if axis == along else size or 1 for axis, size in enumerate(sizes(cache)))
        for cache, along in zip(inputs.caches, grows, strict=True)
    ]
    types = [torch.float32 if inputs.grows is None else DTYPES[cache.type.tensor_type.elem_type] for cache in inputs.caches]
    return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in zip(shapes, types, strict=True)]


class OnnxWeights:
    """The file's tensors under the module's parameter names, handed out as they are mapped."""

    def __init__(self, file: OnnxFile, names: dict[str, str]) -> None:
        self.names = names
        self._file = file

    def keys(self):
        return self.names.keys()

    def get(self, key: str) -> np.ndarray:
        return self._file.tensors[self.names[key]]


class OnnxStep(nn.Module):
    """``forward(token, position, *caches) → (logits, *caches)``: the nodes of ``file``, once ``run`` is set.

    Tensors called in ``weights`` are parameters on the meta device; ``keys`` gives their names in the module and in the file.
    ``batched``: the file's step has a batch axis of 1.
    """

    def __init__(self, file: OnnxFile, weights: list[str], batched: bool) -> None:
        super().__init__()
        self._batched = batched
        self.keys: dict[str, str] = {}
        for name in weights:
            self._add_parameter(name, file.tensors[name])
        self.run: Callable[..., tuple[Tensor, ...]]

    def _add_parameter(self, name: str, value: np.ndarray) -> None:
        """A parameter of about that name: its words are modules within modules, as in the module it once was."""
        *path, last = (_attribute(word) for word in name.replace("/", ".").split("."))
        owner: nn.Module = self
        for word in path:
            owner = owner._modules.setdefault(word, nn.Module())
        tensor = torch.empty(value.shape, dtype=_TORCH[value.dtype.name], device="meta")
        owner.register_parameter(last, nn.Parameter(tensor, requires_grad=False))
        self.keys[".".join((*path, last))] = name

    def forward(self, token: Tensor, position: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        parameters = [self.get_parameter(key) for key in self.keys]
        ids = (token[None], position[None]) if self._batched else (token, position)
        logits, *after = self.run(*ids, *caches, *parameters)
        return (logits[0] if self._batched else logits, *after)


def _attribute(word: str) -> str:
    """``word``, or something like it that modules have no attribute of their own for."""
    return f"{word}_" if not word or hasattr(OnnxStep, word) or word in ("training", "keys", "run") else word
