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
    progress: Progress | None = None,
) -> None:
    """Write the decode graph of an artifact or a model as ONNX; large tensors go to ``path`` with ``.data`` behind it.

    Args:
        source: an artifact (``.kog``), whose weights are as its kernel has them, or a model as for ``kogc.compile``.
        path: the file to write.
        max_context: positions of the KV caches, for a model; by default all it has.
        allow_pickle: unpickle a whole module, which runs code from the file.
        progress: called with what is being done.

    Raises:
        BadInput, FrontendError, GraphError: the model cannot be read, has no weights, or is not recognised.
        EnvironmentFailure: the ``onnx`` package is missing.
        OutputFailure: the file cannot be written.
    """
    if importlib.util.find_spec("onnx") is None:
        raise EnvironmentFailure("writing ONNX needs the onnx package: pip install 'kogc[onnx]'")
    from kogc.onnx.model import write_onnx  # optional

    tell = progress or (lambda step, done, total: None)
    graph, weights = _artifact(Path(source)) if _is_artifact(source) else _model(source, max_context, allow_pickle, tell)
    tell("writing ONNX", 0, 0)
    target = Path(path)
    if isinstance(source, str | Path) and target.exists() and Path(source).exists() and target.samefile(source):
        raise BadInput(f"cannot write {target}: it is the model itself; choose another name")
    try:
        write_onnx(graph, weights, target)
    except OSError as error:
        raise OutputFailure(f"cannot write {target}: {error.strerror or error}") from error


def _is_artifact(source: str | Path | nn.Module) -> bool:
    return isinstance(source, str | Path) and Path(source).suffix == ".kog"


def _artifact(path: Path) -> tuple[Graph, WeightSource]:
    artifact = load(path)
    return artifact.ir, packed_weights(artifact)


def _model(source: str | Path | nn.Module, max_context: int | None, allow_pickle: bool, tell: Progress) -> tuple[Graph, WeightSource]:
    tell("reading the model", 0, 0)
    model = load_model(source, allow_pickle=allow_pickle, max_context=max_context)
    if isinstance(model.weights, MissingWeights):
        raise BadInput(model.weights.problem)
    part = partition(decode_graph(model, Dump(None), tell))
    viewed = separate_views(part)
    return viewed.graph, ViewedWeights(model.weights, viewed.leaves)
