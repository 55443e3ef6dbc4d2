"""``model.pt2``: a decode step that ``torch.export.save`` has written."""

from __future__ import annotations

import io
import json
import pickle
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import InputKind, OutputKind

from kogc.frontend.errors import FrontendError, UnsafeModelWarning, first_line
from kogc.frontend.functional import CachesAsBuffers
from kogc.frontend.model_input import ModelInput, file_identity
from kogc.frontend.module import load_module
from kogc.frontend.quiet import quiet_torch

_SIGNATURE = "forward(token: int64[T], position: int64[T], *caches) -> logits [T, V], *caches"
#: What a graph of plain tensor operations calls.
_PLAIN = ("torch.ops.aten.", "torch.ops.prims.", "torch.ops.higher_order.", "_operator.")


def is_exported(names: list[str]) -> bool:
    """Whether an archive with members ``names`` is what ``torch.export.save`` writes."""
    return any(name.endswith("/archive_format") for name in names) and any("/models/" in name for name in names)


def load_exported(path: Path, *, allow_pickle: bool = False, max_context: int | None = None) -> ModelInput:
    """Read an exported step: the graph is traced again, with the source lines it has kept.

    Its caches are buffers that it writes in place, or inputs behind token and position that come back as results.

    Raises:
        FrontendError: damaged, another signature, or a file whose reading would run code (unless ``allow_pickle``).
    """
    _check_safety(path, allow_pickle)
    try:
        with quiet_torch():
            program = torch.export.load(path)
            module = program.module(check_guards=False)
    except Exception as error:  # whatever PyTorch makes of the file
        raise FrontendError(f"{path} cannot be read as an exported program: {type(error).__name__}: {first_line(error)}") from error
    step = _step(program, module, str(path))
    model = load_module(step, name=path.stem, identity=file_identity(path), max_context=max_context)
    return replace(model, name=path.stem)


def _step(program: torch.export.ExportedProgram, module: nn.Module, where: str) -> nn.Module:
    """The program's module under the contract ``forward(token, position) → logits``."""
    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    inputs = [values[spec.arg.name] for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    results = sum(spec.kind is OutputKind.USER_OUTPUT for spec in program.graph_signature.output_specs)
    token, position, *caches = inputs if len(inputs) >= 2 else (None, None)
    ids = all(isinstance(one, torch.Tensor) and one.dtype == torch.int64 and one.dim() == 1 for one in (token, position))
    if not ids or not all(isinstance(one, torch.Tensor) and one.is_floating_point() for one in caches) or results != 1 + len(caches):
        raise FrontendError(f"{where} has {len(inputs)} inputs and {results} results, expected {_SIGNATURE}")
    tokens = token.shape[0] if isinstance(token.shape[0], int) else None
    if caches:
        return CachesAsBuffers(module, [torch.empty(tuple(cache.shape), dtype=cache.dtype, device="meta") for cache in caches], tokens)
    if tokens is not None:
        module.traced_tokens = tokens
    return module


# ── whether reading runs code ──


def _check_safety(path: Path, allow_pickle: bool) -> None:
    """Refuse, or warn about, a file that PyTorch would run code from: it unpickles and evaluates more than tensors."""
    try:
        with zipfile.ZipFile(path) as archive:
            danger = next(_dangers(archive), None)
    except Exception as error:  # a damaged archive, or JSON of another form than PyTorch writes
        raise FrontendError(f"{path} is truncated or damaged: {first_line(error)}") from error
    if danger is None:
        return
    if not allow_pickle:
        raise FrontendError(f"{path} holds {danger}; reading it would run code from the file. Allow that (--allow-pickle) if you trust it")
    warnings.warn(f"reading {path} runs code from the file", UnsafeModelWarning, stacklevel=4)


def _dangers(archive: zipfile.ZipFile) -> Iterator[str]:
    for name in archive.namelist():
        if name.endswith("_config.json"):
            yield from (f"the pickled object {key}" for key, entry in json.loads(archive.read(name))["config"].items() if _is_pickled(entry))
        elif "/models/" in name and name.endswith(".json"):
            yield from _dangers_of_graph(json.loads(archive.read(name)))
        elif name.endswith(".pt") and not _plain_tensors(archive.read(name)):
            yield f"pickled objects ({name})"


def _is_pickled(entry: dict[str, Any]) -> bool:
    return entry.get("use_pickle", True) or not entry["path_name"].startswith(("weight_", "tensor_"))


def _plain_tensors(content: bytes) -> bool:
    try:
        torch.load(io.BytesIO(content), weights_only=True)
    except pickle.UnpicklingError:
        return False
    return True


def _dangers_of_graph(value: Any) -> Iterator[str]:
    """Guards and symbolic sizes are Python text that is evaluated; a target may be any function that can be reached from torch."""
    if isinstance(value, list):
        for item in value:
            yield from _dangers_of_graph(item)
    elif isinstance(value, dict):
        if value.get("guards_code"):
            yield "guards as Python code"
        if isinstance(value.get("expr_str"), str) and not value["expr_str"].isidentifier():
            yield f"the symbolic size {value['expr_str']}"
        target = value.get("target")
        if isinstance(target, str) and "inputs" in value and not target.startswith(_PLAIN):
            yield f"a call of {target}"
        for item in value.values():
            yield from _dangers_of_graph(item)
