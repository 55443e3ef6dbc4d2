"""ONNX nodes as a Python function of calls, one line each, so that errors name the file and the node."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from kogc.frontend.errors import FrontendError
from kogc.frontend.onnx_ops import OPS, NotPlain


@dataclass(frozen=True)
class Call:
    """``outputs`` = ``function(*inputs)``, by names of the file's values ("" for one left out); ``shown`` is the line for messages."""

    function: Callable[..., Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    shown: str


def plain_call(node: onnx.NodeProto, path: Path) -> Call:
    """``node`` as it is. Raises FrontendError where no rule knows it."""
    if node.domain not in ("", "ai.onnx") or node.op_type not in OPS:
        raise FrontendError(f"{path}: no rule for ONNX op {node.domain + '.' if node.domain else ''}{node.op_type} ({label(node)})")
    return Call(_guarded(node, path), tuple(node.input), tuple(node.output), shown(node))


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}


def label(node: onnx.NodeProto) -> str:
    """The node's name, or what it makes."""
    return node.name or node.output[0]


def shown(node: onnx.NodeProto) -> str:
    return f"{', '.join(node.output)} = {node.op_type}({', '.join(node.input)})"


def _guarded(node: onnx.NodeProto, path: Path) -> Callable[..., Any]:
    given, function = attributes(node), OPS[node.op_type]

    def call(*operands: Any) -> Any:
        try:
            return function(given, *operands)
        except NotPlain as error:
            raise FrontendError(f"{path}: {node.op_type} ({label(node)}): {error}") from error

    return call


def compiled(path: Path, calls: Sequence[Call], inputs: Sequence[str], outputs: Sequence[str], constants: Mapping[str, np.ndarray]) -> Callable[..., Any]:
    """``f(*inputs) → outputs``: all ``calls`` in their order."""
    values = {name: f"v{number}" for number, name in enumerate(inputs)}
    lines, texts = [f"def step({', '.join(values[name] for name in inputs)}):"], ["graph"]
    scope: dict[str, Any] = {}
    for number, (name, value) in enumerate(constants.items()):
        values[name] = f"c{number}"
        scope[values[name]] = value
    for number, call in enumerate(calls):
        scope[f"f{number}"] = call.function
        arguments = ", ".join(values[name] if name else "None" for name in call.inputs)
        for output in call.outputs:
            values[output] = f"r{len(values)}"
        lines.append(f"    {', '.join(values[output] for output in call.outputs)} = f{number}({arguments})")
        texts.append(call.shown)
    lines.append(f"    return {', '.join(values[name] for name in outputs)},")
    name = str(path)
    linecache.cache[name] = (0, None, [f"{text}\n" for text in (*texts, "results")], name)
    exec(compile("\n".join(lines), name, "exec"), scope)  # names are numbers of ours, nothing of the file is in the text
    return scope["step"]
