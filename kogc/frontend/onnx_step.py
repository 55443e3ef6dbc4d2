"""``model.onnx``: a decode step as PyTorch would run it, one line of Python per ONNX node."""

from __future__ import annotations

import linecache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from kogc.frontend.errors import FrontendError
from kogc.frontend.functional import CachesAsBuffers
from kogc.frontend.model_input import ModelInput, file_identity
from kogc.frontend.onnx_file import OnnxFile
from kogc.frontend.onnx_ops import OPS, NotPlain
from kogc.frontend.sources import CheckedWeights, stored_dtype

_SIGNATURE = "int64 token [T] and position [T] and float caches in, logits [T, V] and the new caches out"
#: Tokens of a step that takes any number.
_TOKENS = 4
_TORCH = {"float32": torch.float32, "float16": torch.float16, "float64": torch.float64, "bfloat16": torch.bfloat16}


def load_onnx(path: Path, *, max_context: int | None = None) -> ModelInput:
    """Read a decode step with past caches of fixed length as inputs and present ones as outputs, opset 17 or newer.

    Raises:
        FrontendError: damaged, another signature, or an operation that is not known.
    """
    file = OnnxFile(path)
    token, position, caches = _inputs(file)
    names = file.weights(token.name, [cache.name for cache in caches])
    step = OnnxStep(file, [one.name for one in (token, position, *caches)], names, batched=len(_shape(token)) == 2)
    shapes = [torch.empty(_shape(cache), dtype=torch.float32, device="meta") for cache in caches]
    tokens = _shape(token)[-1]
    module = CachesAsBuffers(step, shapes, None if tokens == _TOKENS else tokens)
    weights = OnnxWeights(file, {f"step.{key}": name for key, name in step.keys.items()})
    expected = {key: tuple(file.tensors[name].shape) for key, name in weights.names.items()}
    return ModelInput(
        name=path.stem, module=module, weights=CheckedWeights(weights, expected, str(path)), config={}, tokenizer_json=None,
        chat_template=None, eos_ids=(), bos_id=None, context=max_context, identity=file_identity(*_files(path)),
        dtype=stored_dtype((_TORCH[file.tensors[name].dtype.name] for name in names), str(path)) if names else "fp32",
    )  # fmt: skip


def _files(path: Path) -> list[Path]:
    return [one for one in (path, path.with_name(f"{path.name}.data")) if one.exists()]


def _inputs(file: OnnxFile) -> tuple[onnx.ValueInfoProto, onnx.ValueInfoProto, list[onnx.ValueInfoProto]]:
    """The inputs that are token ids, positions, and caches."""
    integers = [one for one in file.inputs if one.type.tensor_type.elem_type in (6, 7)]
    caches = [one for one in file.inputs if one.type.tensor_type.elem_type in (1, 10, 11, 16)]
    position = next((one for one in integers if "position" in one.name), integers[-1] if integers else None)
    others = [one for one in integers if one is not position]
    if len(others) != 1 or not caches or len(file.outputs) != 1 + len(caches):
        listed = ", ".join(one.name for one in file.inputs)
        raise FrontendError(f"{file.path} takes {listed or 'nothing'} and gives {len(file.outputs)} results, expected {_SIGNATURE}")
    if any(size < 1 for one in integers for size in _shape(one)):
        raise FrontendError(f"{file.path}: an input of shape {next(shape for shape in map(_shape, integers) if min(shape) < 1)} holds no ids, expected {_SIGNATURE}")
    for cache in caches:
        if any(size.dim_value < 1 for size in cache.type.tensor_type.shape.dim):
            raise FrontendError(f"{file.path}: cache {cache.name} has no fixed shape; export with caches of fixed length that are written at position")
    return others[0], position, caches


def _shape(value: onnx.ValueInfoProto) -> tuple[int, ...]:
    """The shape, with the usual number of tokens where it is open."""
    return tuple(size.dim_value or _TOKENS for size in value.type.tensor_type.shape.dim)


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
    """``forward(token, position, *caches) → (logits, *caches)``: the nodes of ``file``.

    Tensors called in ``weights`` are parameters on the meta device; ``keys`` gives their names in the module and in the file.
    ``batched``: the file's step has a batch axis of 1.
    """

    def __init__(self, file: OnnxFile, inputs: list[str], weights: list[str], batched: bool) -> None:
        super().__init__()
        self._batched = batched
        self.keys: dict[str, str] = {}
        for name in weights:
            self._add_parameter(name, file.tensors[name])
        self._parameter_of = {name: key for key, name in self.keys.items()}
        constants = {name: value for name, value in file.tensors.items() if name not in self._parameter_of}
        self._run = _compiled(file, inputs, list(self._parameter_of), constants)

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
        parameters = [self.get_parameter(key) for key in self._parameter_of.values()]
        ids = (token[None], position[None]) if self._batched else (token, position)
        logits, *after = self._run(*ids, *caches, *parameters)
        return (logits[0] if self._batched else logits, *after)


def _attribute(word: str) -> str:
    """``word``, or something like it that modules have no attribute of their own for."""
    return f"{word}_" if not word or hasattr(OnnxStep, word) or word in ("training", "keys") else word


def _compiled(file: OnnxFile, inputs: list[str], parameters: list[str], constants: dict[str, np.ndarray]) -> Any:
    """The nodes as a Python function, one line each behind its head, so that errors name the file and the node."""
    values: dict[str, str] = {name: f"v{number}" for number, name in enumerate((*inputs, *parameters))}
    scope: dict[str, Any] = {}
    for number, (name, value) in enumerate(constants.items()):
        values[name] = f"c{number}"
        scope[values[name]] = value
    lines, shown = [f"def step({', '.join(values[name] for name in (*inputs, *parameters))}):"], ["graph"]
    for number, node in enumerate(file.nodes):
        if node.domain not in ("", "ai.onnx") or node.op_type not in OPS:
            raise FrontendError(f"{file.path}: no rule for ONNX op {node.domain + '.' if node.domain else ''}{node.op_type} ({node.name or node.output[0]})")
        scope[f"f{number}"] = _call(node, file.path)
        results = []
        for output in node.output:
            values[output] = f"r{len(values)}"
            results.append(values[output])
        arguments = ", ".join(values[name] if name else "None" for name in node.input)
        lines.append(f"    {', '.join(results)} = f{number}({arguments})")
        shown.append(f"{', '.join(node.output)} = {node.op_type}({', '.join(node.input)})")
    lines.append(f"    return {', '.join(values[name] for name in file.outputs)},")
    name = str(file.path)
    linecache.cache[name] = (0, None, [f"{line}\n" for line in (*shown, "results")], name)
    exec(compile("\n".join(lines), name, "exec"), scope)  # names are numbers of ours, nothing of the file is in the text
    return scope["step"]


def _call(node: onnx.NodeProto, path: Path) -> Any:
    attributes = {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}
    function = OPS[node.op_type]

    def call(*operands: Any) -> Any:
        try:
            return function(attributes, *operands)
        except NotPlain as error:
            raise FrontendError(f"{path}: {node.op_type} ({node.name or node.output[0]}): {error}") from error

    return call
