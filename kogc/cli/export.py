"""``kogc export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kogc.cli.console import out, steps
from kogc.cli.options import AllowPickle, TrustRemoteCode, examples

EPILOG = examples("kogc export model.kog --onnx model.onnx", "kogc export ./Qwen3-0.6B --onnx qwen.onnx --max-context 2048")


def register(app: typer.Typer) -> None:
    app.command("export", epilog=EPILOG)(command)


def command(
    source: Annotated[str, typer.Argument(metavar="FILE.kog|MODEL", help="An artifact, or a model as `kogc compile` takes it.")],
    onnx: Annotated[Path, typer.Option("--onnx", metavar="PATH", help="Write the decode graph as ONNX; large tensors go to PATH.data.")],
    max_context: Annotated[int | None, typer.Option(min=2, help="Positions the KV cache of a model holds; by default the model's own limit.")] = None,
    allow_pickle: AllowPickle = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write a model's decode graph in another format: one step, token and position and caches in, logits and caches out."""
    from kogc.export import export_onnx

    with steps() as progress:
        export_onnx(source if source.startswith("preset:") else Path(source), onnx, max_context=max_context, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code, progress=progress)
    out.print(f"{onnx}: open it in Netron, run it with onnxruntime", markup=False)
