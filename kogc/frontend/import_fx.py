"""An exported fx graph as a functional tensor graph: in-place writes become new values, views follow what they show."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import fx

from kogc.frontend.errors import FrontendError
from kogc.frontend.stack_traces import TORCH_FOLDER
from kogc.ir.graph import Graph, Node, Ref, where
from kogc.ir.types import TensorType

DTYPE_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.bool: "bool",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
}
# Say where and how a tensor is stored, never what it holds.
_STORAGE_KWARGS = ("device", "layout", "pin_memory", "memory_format", "non_blocking", "copy")
# Overloads that mean something else than their siblings.
_DISTINCT_OVERLOADS = {"aten.max.dim", "aten.min.dim", "aten.view.dtype", "aten.split.sizes"}
_CASTS = {"aten.to", "aten._to_copy", "aten.type_as"}
_RESHAPES = {"aten.view", "aten.reshape", "aten._unsafe_view", "aten.flatten", "aten.unflatten", "aten.squeeze", "aten.unsqueeze"}
_SAME = {"aten.alias", "aten.detach", "aten.contiguous", "aten.to"}
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*\n(?:\s*(?P<code>[^\n]*))?')


@dataclass
class _Storage:
    """Memory that values share. ``node`` names the graph node with its present contents."""

    node: str
    leaf: str  # op of the leaf it began as, or "" for a computed value
    key: str = ""
    version: int = 0


@dataclass
class _Value:
    """What an fx node stands for: a storage seen through view ops. ``node`` holds it as of ``version``."""

    storage: _Storage
    node: str
    views: tuple[Node, ...] = ()
    version: int = 0


class FxImporter:
    """Fills ``graph`` from an fx graph: bind the placeholders, ``run``, then ``read`` the outputs."""

    def __init__(self, graph: Graph, module: fx.GraphModule) -> None:
        self.graph = graph
        self._values: dict[fx.Node, Any] = {}
        self._caches: list[_Storage] = []
        self._leaves: dict[tuple[str, str], _Storage] = {}
        self._written = _written_inputs(module)

    # ── leaves ──

    def bind_input(self, node: fx.Node, name: str) -> None:
        """``node`` is the step's input ``token`` or ``position``."""
        self._bind(node, name, name, {})

    def bind_weight(self, node: fx.Node, key: str) -> None:
        """``node`` is the parameter ``key``."""
        self._bind(node, "weight", node.name, {"key": key})

    def bind_buffer(self, node: fx.Node, key: str, value: torch.Tensor) -> None:
        """``node`` is the buffer ``key``: a cache when the graph writes it, otherwise data."""
        if node in self._written:
            self._bind(node, "cache", node.name, {"key": key})
        elif node.users:
            self._bind_data(node, key, value)

    def bind_cache(self, node: fx.Node, key: str) -> None:
        """``node`` is a cache that is an argument, called ``key``; what it becomes is a result."""
        self._bind(node, "cache", node.name, {"key": key})

    def bind_constant(self, node: fx.Node, key: str, value: torch.Tensor) -> None:
        """``node`` is a tensor the model holds as a plain attribute or made from Python numbers."""
        if node in self._written:
            raise FrontendError(
                f"{self.graph.name} writes the tensor {key}, which is not a buffer; register KV caches with register_buffer"
            )
        self._bind_data(node, key, value)

    def _bind_data(self, node: fx.Node, key: str, value: torch.Tensor) -> None:
        if value.is_meta:
            raise FrontendError(f"buffer {key} of {self.graph.name} is read but has no values (meta device); fill it before tracing")
        self.graph.tables[key] = to_numpy(value).copy()  # the graph must not change with the module
        self._bind(node, "table", node.name, {"key": key})

    def _bind(self, node: fx.Node, op: str, name: str, attrs: Mapping[str, Any]) -> None:
        key = attrs.get("key", "")
        storage = self._leaves.get((op, key or name))
        if storage is None:
            kind = tensor_type(node.meta["val"], f"{op} {key or name}")
            leaf = self.graph.add(Node(self._fresh(name), op, (), kind, attrs))
            storage = self._leaves[(op, key or name)] = _Storage(leaf.name, op, key)
            if op == "cache":
                self._caches.append(storage)
        self._values[node] = _Value(storage, storage.node)

    # ── running ──

    def run(self, graph: fx.Graph) -> None:
        """Import every computation of ``graph`` in its order."""
        for node in graph.nodes:
            if node.op == "call_function":
                self._call(node)
            elif node.op == "get_attr":
                self._attribute(node)

    def read(self, node: fx.Node) -> str:
        """Name of the graph node with the present contents of ``node``."""
        return self._current(self._values[node])

    def final_caches(self) -> tuple[str, ...]:
        """Names of the nodes that hold the written caches after the step."""
        return tuple(storage.node for storage in self._caches if storage.version)

    def _attribute(self, node: fx.Node) -> None:
        value = operator.attrgetter(node.target)(node.graph.owning_module)
        if isinstance(value, torch.Tensor):  # anything else is a subgraph, which the call that runs it looks up
            self._bind_data(node, node.target, value)

    def _call(self, node: fx.Node) -> None:
        op = _op_name(node)
        if op.startswith("aten._assert"):  # says what is known already
            return
        if op.startswith("wrap_with"):
            self._values[node] = self._inline(node, op)
        elif op == "getitem" and isinstance(self._values[node.args[0]], tuple):
            self._values[node] = self._values[node.args[0]][node.args[1]]
        elif op != "getitem" and not isinstance(node.target, torch._ops.OpOverload):
            raise FrontendError(f"{self.graph.name} uses {op}{_at(node)}; a decode step must be plain tensor operations")
        elif _writes_first(node):
            self._write(node, op)
        else:
            self._compute(node, op)

    def _inline(self, node: fx.Node, op: str) -> tuple[_Value, ...]:
        """A context manager of the user's code became a subgraph: import it in place."""
        if op == "wrap_with_autocast" and node.args[2]:
            raise FrontendError(f"{self.graph.name} runs under autocast{_at(node)}; cast explicitly instead")
        inner, pairs = _subgraph(node)
        self._values |= {placeholder: self._values[arg] for placeholder, arg in pairs}
        self.run(inner)
        (output,) = (n for n in inner.nodes if n.op == "output")
        results = output.args[0]
        results = results if isinstance(results, list | tuple) else (results,)
        return tuple(self._values[result] for result in results)

    def _compute(self, node: fx.Node, op: str) -> None:
        made = self._add(node, op)
        source = _viewed(node)
        if source is None:
            self._values[node] = _Value(_Storage(made.name, ""), made.name)
        else:
            seen = self._values[source]
            self._values[node] = _Value(seen.storage, made.name, (*seen.views, made), seen.storage.version)

    def _write(self, node: fx.Node, op: str) -> None:
        target = self._values[node.args[0]]
        storage = target.storage
        if op == "aten.copy_" and self._is_scratch(target):
            self._overwrite(node, storage)
            self._values[node] = target
            return
        if storage.leaf not in ("", "cache"):
            raise FrontendError(f"{self.graph.name} writes its {storage.leaf} {storage.key} in place{_at(node)}; only KV caches may be written")
        new = self._add(node, op.removesuffix("_"))
        for depth in reversed(range(len(target.views))):
            whole = self._current(_Value(storage, storage.node, target.views[:depth], -1))
            new = self._put_back(target.views[depth], self.graph[whole], new)
        storage.node, storage.version = new.name, storage.version + 1
        self._values[node] = target

    def _is_scratch(self, target: _Value) -> bool:
        """Whether ``target`` is a whole buffer that nobody has read yet: what it held before the step does not matter."""
        return target.storage.leaf == "cache" and not target.views and not self.graph.users(target.storage.node)

    def _overwrite(self, node: fx.Node, storage: _Storage) -> None:
        """The buffer becomes what is copied into it, and is no state any more."""
        kind = self.graph[storage.node].type
        name, source, module = self.read(node.args[1]), _source(node), _module_path(node)
        for op, args in (("aten.to", (Ref(0), kind.dtype)), ("aten.expand", (Ref(0), kind.shape))):
            shape = kind.shape if op == "aten.expand" else self.graph[name].type.shape
            attrs = {"args": args, "kwargs": {}}
            name = self.graph.add(Node(self._fresh(node.name), op, (name,), TensorType(shape, kind.dtype), attrs, source, module)).name
        self._caches.remove(storage)
        storage.node, storage.leaf, storage.version = name, "", storage.version + 1

    def _put_back(self, view: Node, whole: Node, part: Node) -> Node:
        """The contents of ``whole`` after ``part``, a new value of its view ``view``, was written."""
        rest = view.attrs["args"][1:]
        if view.op in ("aten.select", "aten.slice"):
            op, inputs, args = f"{view.op}_scatter", (whole.name, part.name), (Ref(0), Ref(1), *rest)
        elif view.op in ("aten.transpose", "aten.t"):
            op, inputs, args = view.op, (part.name,), (Ref(0), *rest)
        elif view.op == "aten.permute":
            back = tuple(int(axis) for axis in np.argsort([axis % len(rest[0]) for axis in rest[0]]))
            op, inputs, args = view.op, (part.name,), (Ref(0), back)
        elif view.op in _RESHAPES:
            op, inputs, args = "aten.view", (part.name,), (Ref(0), whole.type.shape)
        elif view.op in _SAME:
            return part
        else:
            raise FrontendError(
                f"{self.graph.name} writes in place through {view.op}, which is not supported{where(part)}; "
                "write the cache buffer itself with index_copy_ or by index"
            )
        attrs = {"args": args, "kwargs": {}}
        return self.graph.add(Node(self._fresh(f"{view.name}_written"), op, inputs, whole.type, attrs, part.source, part.module))

    def _current(self, value: _Value) -> str:
        """The node of ``value``, its views taken anew when the storage was written since."""
        if value.version != value.storage.version:
            name = value.storage.node
            for view in value.views:
                name = self.graph.add(view.with_(name=self._fresh(f"{view.name}_again"), inputs=(name, *view.inputs[1:]))).name
            value.node, value.version = name, value.storage.version
        return value.node

    # ── nodes ──

    def _add(self, node: fx.Node, op: str) -> Node:
        inputs: list[str] = []

        def operand(arg: fx.Node) -> Ref:
            inputs.append(self.read(arg))
            return Ref(len(inputs) - 1)

        kind = tensor_type(_first(node.meta["val"]), f"{op}{_at(node)}")
        args = tuple(_plain(arg, operand) for arg in node.args)
        kwargs = {k: _plain(v, operand) for k, v in node.kwargs.items() if k not in _STORAGE_KWARGS and v is not None}
        if op in _CASTS:
            op, args, kwargs, inputs = "aten.to", (Ref(0), kind.dtype), {}, inputs[:1]
        elif op == "aten.detach_":
            op = "aten.detach"
        elif op == "aten.rms_norm":
            args, kwargs = _with_eps(args, kwargs, node.meta["val"].dtype), {}
        attrs = {"args": args, "kwargs": kwargs}
        return self.graph.add(Node(self._fresh(node.name), op, tuple(inputs), kind, attrs, _source(node), _module_path(node)))

    def _fresh(self, name: str) -> str:
        candidate, count = name, 1
        while candidate in self.graph:
            candidate, count = f"{name}_{count}", count + 1
        return candidate


def tensor_type(value: Any, what: str) -> TensorType:
    """The IR type of a (fake) tensor. Raises FrontendError for a dtype the IR does not have."""
    if not isinstance(value, torch.Tensor):
        raise FrontendError(f"{what} makes a {type(value).__name__}, expected a tensor; keep shapes and indices static")
    if value.dtype not in DTYPE_NAMES:
        raise FrontendError(f"{what} has dtype {value.dtype}; supported are {', '.join(map(str, DTYPE_NAMES))}")
    return TensorType(tuple(int(size) for size in value.shape), DTYPE_NAMES[value.dtype])


def to_numpy(value: torch.Tensor) -> np.ndarray:
    """The values on the host, bfloat16 as ``ml_dtypes.bfloat16``; shares memory where PyTorch allows."""
    value = value.detach().cpu()
    if value.dtype == torch.bfloat16:
        return value.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return value.numpy()


def _op_name(node: fx.Node) -> str:
    target = node.target
    if target is operator.getitem:
        return "getitem"
    if isinstance(target, torch._ops.OpOverload):
        full = str(target)  # namespace.name.overload
        return full if full in _DISTINCT_OVERLOADS else full.rpartition(".")[0]
    return getattr(target, "__name__", str(target))


def _writes_first(node: fx.Node) -> bool:
    if node.target is torch.ops.aten.detach_.default:  # changes autograd's bookkeeping, no values
        return False
    schema = getattr(node.target, "_schema", None)
    written = [i for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write] if schema else []
    if written and written != [0]:
        raise FrontendError(f"{_op_name(node)} writes into an out= argument{_at(node)}, which is not supported")
    return bool(written)


def _viewed(node: fx.Node) -> fx.Node | None:
    """The operand whose memory the result shares, or None when the result is its own."""
    if node.target is operator.getitem:
        return node.args[0] if _may_view(node.args[0]) else None
    if not _may_view(node):
        return None
    source = node.args[0]
    shown, seen = (_first(n.meta["val"]).untyped_storage()._cdata for n in (node, source))
    # `to`, `contiguous` and `reshape` may be views by their schema and copies in fact.
    return source if shown == seen else None


def _may_view(node: fx.Node) -> bool:
    """Whether results of ``node`` may share an operand's memory, by its schema."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info for result in schema.returns)


def _written_inputs(module: fx.GraphModule) -> set[fx.Node]:
    """Placeholders whose memory some op of the graph writes, directly, through views or inside a subgraph."""
    origin: dict[fx.Node, fx.Node] = {}
    written: set[fx.Node] = set()

    def walk(graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            if _op_name(node).startswith("wrap_with"):
                inner, pairs = _subgraph(node)
                origin.update({placeholder: origin.get(arg, arg) for placeholder, arg in pairs})
                walk(inner)
            elif _writes_first(node):
                origin[node] = origin.get(node.args[0], node.args[0])
                written.add(origin[node])
            elif (source := _viewed(node)) is not None:
                origin[node] = origin.get(source, source)

    walk(module.graph)
    return written


def _subgraph(node: fx.Node) -> tuple[fx.Graph, list[tuple[fx.Node, fx.Node]]]:
    """The graph a ``wrap_with…`` call runs, and its placeholders with the nodes they stand for."""
    position = next(i for i, arg in enumerate(node.args) if isinstance(arg, fx.Node) and arg.op == "get_attr")
    inner = operator.attrgetter(node.args[position].target)(node.graph.owning_module).graph
    placeholders = [n for n in inner.nodes if n.op == "placeholder"]
    return inner, list(zip(placeholders, node.args[position + 1 :], strict=True))


def _plain(arg: Any, operand: Callable[[fx.Node], Ref]) -> Any:
    """An argument as JSON-able values, with ``operand(node)`` in place of every node."""
    if isinstance(arg, fx.Node):
        return operand(arg)
    if isinstance(arg, list | tuple):
        return tuple(_plain(item, operand) for item in arg)
    if isinstance(arg, torch.dtype):
        return DTYPE_NAMES.get(arg, str(arg))
    if isinstance(arg, torch.device | torch.layout | torch.memory_format):
        return None
    return arg


def _with_eps(args: tuple, kwargs: Mapping[str, Any], dtype: torch.dtype) -> tuple:
    """Arguments of rms_norm with its default epsilon, which depends on the dtype, written out."""
    x, shape, weight, eps = (*args, *(None,) * (4 - len(args)))
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    eps = kwargs.get("eps", eps)
    return (x, shape, kwargs.get("weight", weight), torch.finfo(wide).eps if eps is None else eps)


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list | tuple) else value


def _source(node: fx.Node) -> str | None:
    """``file:line: code`` of the innermost frame outside of PyTorch."""
    frames = [f for f in _FRAME.finditer(node.meta.get("stack_trace") or "") if not f["file"].startswith(TORCH_FOLDER)]
    return f"{frames[-1]['file']}:{frames[-1]['line']}: {(frames[-1]['code'] or '').strip()}" if frames else None


def _at(node: fx.Node) -> str:
    source = _source(node)
    return f" (at {source})" if source else ""


def _module_path(node: fx.Node) -> str | None:
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    path, _ = list(stack.values())[-1]
    return path.partition("@")[0]  # a module called again has its count behind an @
