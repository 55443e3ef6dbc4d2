"""``kogc explain``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kogc.cli.console import out, print_json, steps
from kogc.cli.options import AllowPickle, Dtype, TrustRemoteCode, examples

if TYPE_CHECKING:
    from kogc.explain import Explanation, Problem
    from kogc.explain_layers import FusedStage, LayerGroup

EPILOG = examples(
    "kogc explain ./Qwen3-8B    (config.json alone is enough)",
    "kogc explain preset:llama-3.2-1b --max-context 4096",
    "kogc explain model.pt --json",
)


def register(app: typer.Typer) -> None:
    app.command("explain", epilog=EPILOG)(command)


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A .pt, .pt2, .onnx or .gguf file, a Hugging Face folder, or preset:NAME.")],
    dtype: Annotated[Dtype | None, typer.Option(help="Storage type that sizes are told for; by default the model's own.")] = None,
    max_context: Annotated[int | None, typer.Option(min=2, help="Positions the KV cache holds; by default the model's own limit.")] = None,
    position: Annotated[int | None, typer.Option(min=0, help="Context position that bytes are counted at; by default half the context.")] = None,
    allow_pickle: AllowPickle = False,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of text.")] = False,
) -> None:
    """Say what kogc recognises in MODEL, layer by layer, what it would fuse, and what it does not support. Needs no weights.

    Exit code 2 when something is not supported.
    """
    from kogc.explain import explain

    with steps() as progress:
        found = explain(
            model if model.startswith("preset:") else Path(model), dtype=dtype.value if dtype else None, max_context=max_context,
            position=position, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code, progress=progress,
        )  # fmt: skip
    if as_json:
        print_json(found.to_json())
    else:
        _print(found)
    if not found.supported:
        raise typer.Exit(2)


def _print(found: Explanation) -> None:
    positions = f", {found.context} positions" if found.context else ""
    _line(f"{found.model}: {_count(found.parameters)} parameters, {_size(found.weight_bytes)} in {found.dtype}{positions}")
    for problem in found.problems:
        _line("")
        _problem(problem)
    for group in found.layers:
        _line("")
        _group(group)
    if found.traffic is not None:
        _line("")
        _line(f"bytes per token  {_size(found.traffic.weights)} of weights + {_size(found.traffic.kv)} of KV cache at position {found.position}")
    for one in found.predictions:
        _line(f"predicted        {one.tok_s:.1f} tok/s at most on {one.target}: {one.title} reading {one.bandwidth_gb_s:g} GB/s without gaps")


def _problem(problem: Problem) -> None:
    times = f", {problem.count} times" if problem.count > 1 else ""
    where = f" in module {problem.module}" if problem.module else ""
    _line(f"not supported    {problem.op or 'the model'}{where}{times}")
    _line(f"  {problem.why}")
    if problem.source:
        _line(f"  at {problem.source}")


def _group(group: LayerGroup) -> None:
    _line(f"{group.name}{f'   {group.count} times' if group.count > 1 else ''}")
    _line(f"  recognised     {', '.join(op if count == 1 else f'{count} {op}' for op, count in group.recognised.items())}")
    for stage in group.stages:
        _line(f"  {stage.kind:<13}  {_stage(stage)}")


def _stage(stage: FusedStage) -> str:
    products = ", ".join(f"{rows}×{columns}" for rows, columns in stage.products)
    steps_of = [*(_once(stage.first)), products or stage.detail, *(_once(stage.then))]
    size = f"   {_size(stage.bytes)}" if stage.bytes else ""
    return ": ".join(filter(None, (stage.name, " → ".join(filter(None, steps_of))))) + size


def _once(ops: tuple[str, ...]) -> list[str]:
    """The ops in their order, repeated ones (of the query and of the key) once."""
    return list(dict.fromkeys(ops))


def _line(text: str) -> None:
    out.print(text, markup=False)


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
