"""Models and artifacts written in other formats: `kogc export`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from kogc.artifact import load
from kogc.compile_passes import decode_graph
from kogc.dump import Dump
from kogc.errors import BadInput, EnvironmentFailure, OutputFailure
from kogc.frontend.load import load_model
from kogc.frontend.sources import MissingWeights
from kogc.ir.graph import Graph
from kogc.ir.passes.partition import partition
from kogc.ir.passes.views import ViewedWeights, separate_views
from kogc.ir.weights import WeightSource
from kogc.output import check_output, replacing
from kogc.packed import packed_weights
from kogc.verify import Progress

if TYPE_CHECKING:
    from torch import nn


def export_onnx(
    source: str | Path | nn.Module,
    path: str | Path,
    *,
    max_context: int | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write the decode graph of an artifact or a model as ONNX; large tensors go to ``path`` with ``.data`` behind it.

    Args:
        source: an artifact (``.kog``), whose weights are as its kernel has them, or a model as for ``kogc.compile``.
        path: the file to write.
        max_context: positions of the KV caches, for a model; by default all it has.
        allow_pickle: unpickle a whole module, which runs code from the file.
        trust_remote_code: run the model code that a Hugging Face folder brings along.
        progress: called with what is being done.

    Raises:
        BadInput, FrontendError, GraphError: the model cannot be read, has no weights, or is not recognised.
        EnvironmentFailure: the ``onnx`` package is missing.
        BadInput: the file would replace something else than an earlier export.
        OutputFailure: the file cannot be written. Nothing is then left of it, and what was there is as it was.
    """
    if importlib.util.find_spec("onnx") is None:
        raise EnvironmentFailure("writing ONNX needs the onnx package: pip install 'kogc[onnx]'")
    from kogc.onnx.model import write_onnx  # optional

    target, data = Path(path), Path(f"{path}.data")
    _check(target, data, source)
    tell = progress or (lambda step, done, total: None)
    allowed = {"allow_pickle": allow_pickle, "trust_remote_code": trust_remote_code}
    graph, weights = _artifact(Path(source)) if _is_artifact(source) else _model(source, max_context, allowed, tell)
    tell("writing ONNX", 0, 0)
    try:
        with replacing(data, target) as (data_part, target_part):
            write_onnx(graph, weights, target_part, data_part, data.name)
    except OSError as error:
        raise OutputFailure(f"cannot write {target}: {error.strerror or error}") from error


def _check(target: Path, data: Path, source: str | Path | nn.Module) -> None:
    """Raises BadInput and OutputFailure where ``target`` and the file for its large tensors cannot or must not be written."""
    check_output(target, source, suffix=".onnx", option="--onnx")
    check_output(data, source, suffix=".data", option="--onnx")
    if data.exists() and not target.exists():  # large tensors of another model, maybe of this very source
        raise BadInput(f"cannot write {target}: its large tensors go to {data}, which is there without it; choose another name with --onnx, or delete it")


def _is_artifact(source: str | Path | nn.Module) -> bool:
    return isinstance(source, str | Path) and Path(source).suffix == ".kog"


def _artifact(path: Path) -> tuple[Graph, WeightSource]:
    artifact = load(path)
    return artifact.ir, packed_weights(artifact)


def _model(source: str | Path | nn.Module, max_context: int | None, allowed: dict[str, bool], tell: Progress) -> tuple[Graph, WeightSource]:
    tell("reading the model", 0, 0)
    model = load_model(source, **allowed, max_context=max_context)
    if isinstance(model.weights, MissingWeights):
        raise BadInput(model.weights.problem)
    part = partition(decode_graph(model, Dump(None), tell))
    viewed = separate_views(part)
    return viewed.graph, ViewedWeights(model.weights, viewed.leaves)
