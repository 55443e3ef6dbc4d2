"""``kogc verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kogc.cli.console import out, print_json, steps
from kogc.cli.gate import gate_json, gate_line
from kogc.cli.options import TrustRemoteCode, examples

EPILOG = examples(
    "kogc verify model.kog model.pt    (against the PyTorch module, stage by stage too)",
    "kogc verify model.kog             (against the artifact's own IR, interpreted)",
    "kogc verify model.kog --structure (hashes only; runs nothing from the file)",
)


def register(app: typer.Typer) -> None:
    app.command("verify", epilog=EPILOG)(command)


def command(
    file: Annotated[Path, typer.Argument(metavar="F.kog", help="An artifact made by `kogc compile`.")],
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="What it was compiled from: .pt, .gguf, folder or preset:NAME.")] = None,
    structure: Annotated[bool, typer.Option("--structure", help="Check the file's hashes only; nothing in it is run.")] = False,
    allow_pickle: Annotated[bool, typer.Option("--allow-pickle", help="Unpickle MODEL. This runs code from the file.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Check an artifact: its bytes, its logits against PyTorch, and every stage, naming the first one that is off."""
    from kogc.artifact import load

    artifact = load(file)
    artifact.verify_hashes()
    if structure:
        print_json({"file": str(file), "hashes": "ok"}) if as_json else out.print(f"{file}: all hashes are right", markup=False)
        return
    from kogc.verify import verify_artifact

    with steps() as progress:
        result = verify_artifact(artifact, model, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code, progress=progress)
    if as_json:
        print_json(gate_json(result))
    else:
        out.print(gate_line(result), markup=False)
        for check in result.stages:
            mark = "ok " if check.passed else "OFF"
            out.print(f"  {mark} {check.stage}: relative RMSE {check.rel_rmse:.1e}, cosine 1 − {1 - check.cosine:.0e}", markup=False)
    raise typer.Exit(0 if result.passed else 1)
