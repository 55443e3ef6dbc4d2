"""From a PyTorch decoder step to a tensor graph, by way of ``torch.export``."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import networkx as nx
import torch
from torch import nn
from torch.export.graph_signature import InputKind, OutputKind

from kogc.frontend.errors import FrontendError, first_line, raised_at
from kogc.frontend.import_fx import FxImporter
from kogc.frontend.placeholders import ready_to_trace
from kogc.frontend.quiet import quiet_torch
from kogc.frontend.stack_traces import user_stack_traces
from kogc.ir.graph import Graph

CONTRACT = "forward(token: int64[T], position: int64[T]) -> logits [T, V]"


#: Tokens of a traced step where the module has no ``traced_tokens`` of its own.
STEP = 4


def trace(module: nn.Module, capacity: int | None = None, tokens: int | None = None, name: str | None = None) -> Graph:
    """The tensor graph of one decode step of ``module``.

    Args:
        module: follows the contract ``forward(token: int64[T], position: int64[T]) -> logits [T, V]``; its KV caches are
            buffers it writes in place. Parameters and caches may be on the meta device: nothing reads their values.
            The module is left as it was.
        capacity: positions the caches hold; by default read from the caches, when they agree.
        tokens: T, the number of tokens of the traced step. Shapes in the graph hold this number. By default the module's
            ``traced_tokens``, which a step has that takes no other number.
        name: name of the graph; by default the module's class.

    Returns:
        A graph of level ``tensor``. Leaves are ``token``, ``position``, ``weight`` and ``cache`` (keys are dotted names in
        the module) and ``table`` for buffers that are only read and for constants. All other nodes are functional
        ATen ops (``aten.add``; in-place writes become their functional form, and later reads see the new value), or
        ``getitem`` for one output of an op that has several. ``outputs`` is (logits,), ``effects`` the caches after the
        step. ``meta`` holds ``capacity``, ``tokens``, ``vocab`` and ``caches`` (type by key).

    Raises:
        FrontendError: the module breaks the contract, or ``torch.export`` cannot follow it.
    """
    _check_signature(module)
    tokens = tokens or step_tokens(module)
    with ready_to_trace(module) as device:
        program = _export(module, tokens, device)
    graph = _import(module, program, name or type(module).__name__)
    _check_dependence(graph)
    graph = graph.without_dead_nodes()
    read = {node.attrs["key"] for node in graph if node.op == "table"}
    graph.tables = {key: value for key, value in graph.tables.items() if key in read}
    graph.meta |= _facts(graph, capacity, tokens)
    return graph


def cache_arguments(module: nn.Module) -> tuple[str, ...]:
    """Names of the buffers that ``module`` also takes and returns, new ones for old ones."""
    return getattr(module, "cache_arguments", ())


def step_tokens(module: nn.Module) -> int:
    """The tokens to give ``module`` at once."""
    return getattr(module, "traced_tokens", STEP)


def _check_signature(module: nn.Module) -> None:
    try:
        inspect.signature(module.forward).bind(None, None)
    except TypeError as error:
        raise FrontendError(
            f"{type(module).__name__}.forward{inspect.signature(module.forward)} cannot be called with (token, position)"
            f": {error}; wrap the model in a module with {CONTRACT}"
        ) from error


def _export(module: nn.Module, tokens: int, device: torch.device) -> torch.export.ExportedProgram:
    caches = tuple(module.get_buffer(name) for name in cache_arguments(module))
    example = (torch.zeros(tokens, dtype=torch.int64, device=device), torch.arange(tokens, device=device), *caches)
    try:
        with torch.no_grad(), user_stack_traces(), quiet_torch():
            return torch.export.export(module, example, strict=False)
    except FrontendError:
        raise
    except Exception as error:  # torch.export lets whatever the model raises through
        raise FrontendError(
            f"torch.export cannot trace {type(module).__name__}: {type(error).__name__}: {first_line(error)}{raised_at(error)}; the step "
            "must not read tensor values into Python (no .item(), int(position) or branches on them)"
        ) from error


def _import(module: nn.Module, program: torch.export.ExportedProgram, name: str) -> Graph:
    graph = Graph("tensor", name)
    importer = FxImporter(graph, program.graph_module)
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    parameters = _canonical_names(module.named_parameters(remove_duplicate=False))
    buffers = _canonical_names(module.named_buffers(remove_duplicate=False))
    inputs, caches = ["token", "position"], list(cache_arguments(module))
    for spec in program.graph_signature.input_specs:
        node = placeholders[spec.arg.name]
        if spec.kind is InputKind.USER_INPUT:
            if inputs:  # optional arguments of the user's forward come after these two
                importer.bind_input(node, inputs.pop(0))
            elif caches:
                importer.bind_cache(node, caches.pop(0))
        elif spec.kind is InputKind.PARAMETER:
            importer.bind_weight(node, parameters[spec.target])
        elif spec.kind is InputKind.BUFFER:
            importer.bind_buffer(node, buffers[spec.target], module.get_buffer(spec.target))
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            importer.bind_constant(node, spec.target, program.constants[spec.target])
        else:
            raise FrontendError(f"{name} takes an input of kind {spec.kind.name} ({spec.arg.name}), which is not supported")
    importer.run(program.graph)
    logits, *after = _results(program, name, 1 + len(cache_arguments(module)))
    graph.outputs = (_logits(logits, importer, name),)
    graph.effects = (*importer.final_caches(), *map(importer.read, after))
    if not graph.effects:
        raise FrontendError(
            f"{name} writes no KV cache; register caches as buffers [KV, capacity, head_dim] and write them in place at position"
        )
    return graph


def _canonical_names(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Name → the first name of the same tensor, so that tied tensors share one key."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def _results(program: torch.export.ExportedProgram, name: str, count: int) -> list[torch.fx.Node]:
    """What the step returns: the logits, and the caches that were arguments."""
    specs = program.graph_signature.output_specs
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    results = [arg for spec, arg in zip(specs, output.args[0], strict=True) if spec.kind is OutputKind.USER_OUTPUT]
    if len(results) != count or not all(isinstance(result, torch.fx.Node) for result in results):
        caches = f" and {count - 1} caches" if count > 1 else " alone"
        raise FrontendError(f"{name}.forward returns {len(results)} values, expected the logits [T, V]{caches}; {CONTRACT}")
    return results


def _logits(result: torch.fx.Node, importer: FxImporter, name: str) -> str:
    logits, tokens = importer.read(result), importer.graph["token"].type.shape[0]
    kind = importer.graph[logits].type
    if len(kind.shape) != 2 or kind.shape[0] != tokens or not kind.is_float:
        raise FrontendError(f"{name}.forward returns {kind} for T = {tokens}, expected float logits [T, V]; {CONTRACT}")
    return logits


def _check_dependence(graph: Graph) -> None:
    """A graph that ignores an input was traced with a baked-in Python number."""
    for leaf, hint in (
        ("position", "index tables and caches, and mask, by the position tensor, never by a Python int"),
        ("token", "look the embedding up by the token tensor"),
    ):
        reached = nx.descendants(graph.nx, leaf)
        if not reached & {*graph.outputs, *graph.effects}:
            raise FrontendError(f"{graph.name} does not depend on {leaf}: {hint}")


def _facts(graph: Graph, capacity: int | None, tokens: int) -> dict:
    caches = {node.attrs["key"]: node.type for node in graph if node.op == "cache"}
    found = {kind.shape[-2] for kind in caches.values() if len(kind.shape) >= 2}
    if capacity is None and len(found) == 1:
        (capacity,) = found
    return {
        "capacity": capacity,
        "tokens": tokens,
        "vocab": graph[graph.outputs[0]].type.shape[1],
        "caches": caches,
    }
