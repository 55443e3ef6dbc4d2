"""``kogc inspect``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.syntax import Syntax
from rich.table import Table

from kogc.cli.console import out, print_json
from kogc.cli.gate import gate_json, gate_line
from kogc.cli.options import examples
from kogc.cli.ranks import workers_line
from kogc.errors import BadInput, OutputFailure

EPILOG = examples(
    "kogc inspect model.kog                      (the summary)",
    "kogc inspect model.kog --source | less -R   (the emitted kernel)",
    "kogc inspect model.kog --asm | less -R      (its machine code: SASS on NVIDIA GPUs)",
    "kogc inspect model.kog --ir                 (the decode graph, as text that can be read back)",
    "kogc inspect model.kog --graph stages.svg   (a picture for the browser)",
    "kogc inspect model.kog --bandwidth 4800     (what an H200's memory would allow)",
)


def register(app: typer.Typer) -> None:
    app.command("inspect", epilog=EPILOG)(command)


def command(
    file: Annotated[Path, typer.Argument(metavar="F.kog", help="An artifact made by `kogc compile`.")],
    source: Annotated[bool, typer.Option("--source", help="The emitted kernel, highlighted on a terminal.")] = False,
    asm: Annotated[bool, typer.Option("--asm", help="The binary's machine code, disassembled.")] = False,
    ir: Annotated[bool, typer.Option("--ir", help="The decode graph as text.")] = False,
    program: Annotated[bool, typer.Option("--program", help="The rolled program as JSON.")] = False,
    graph: Annotated[Path | None, typer.Option("--graph", metavar="OUT.svg", help="Draw the stages and what crosses between them.")] = None,
    summary: Annotated[bool, typer.Option("--summary", help="Stages, exchanges, bytes and predicted speed (the default).")] = False,
    bandwidth: Annotated[float | None, typer.Option(metavar="GB/s", min=0.001, max=1e9, help="Memory bandwidth for the predicted speed; by default the target's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The summary as one JSON object.")] = False,
) -> None:
    """Look inside an artifact. Nothing in it is executed."""
    from kogc.artifact import load

    if sum((source, asm, ir, program, graph is not None, summary or as_json)) > 1:
        raise BadInput("choose one of --source, --asm, --ir, --program, --graph and --summary")
    artifact = load(file)
    if source:
        _show_code(artifact.source, "cpp")
    elif asm:
        from kogc.targets.toolchains import load_toolchain

        _show_code(load_toolchain(artifact.manifest.target).disassemble(bytes(artifact.binary)), "gas")
    elif ir:
        from kogc.ir.text import to_text

        typer.echo(to_text(artifact.ir), nl=False)
    elif program:
        typer.echo(artifact.member_text("program.json"))
    elif graph is not None:
        _draw(artifact, graph)
    else:
        _summarize(artifact, bandwidth, as_json)


def _show_code(text: str, language: str) -> None:
    if out.is_terminal:
        out.print(Syntax(text, language, theme="ansi_dark", word_wrap=False))
    else:
        typer.echo(text, nl=False)


def _draw(artifact: Any, path: Path) -> None:
    from kogc.ir.draw import draw

    if path.exists() and path.samefile(artifact.path):
        raise BadInput(f"cannot write {path}: it is the artifact itself; choose another name")
    try:
        path.write_text(draw(artifact.program), encoding="utf-8")
    except OSError as error:
        raise OutputFailure(f"cannot write {path}: {error.strerror}") from None
    out.print(f"{path}: open it in a browser", markup=False)


def _summarize(artifact: Any, bandwidth: float | None, as_json: bool) -> None:
    from kogc.inspect import summarize, usual_bandwidth

    facts = summarize(artifact)
    bandwidth = bandwidth or usual_bandwidth(artifact)
    gate = artifact.manifest.gate
    if as_json:
        print_json(
            {
                "model": facts.model, "target": facts.target, "dtype": facts.dtype, "workers": facts.workers, "ranks": facts.ranks,
                "rank_exchanges_per_token": facts.rank_exchanges,
                "context": facts.context, "layers": facts.layers, "stages": [vars(row) for row in facts.stages],
                "exchanges_per_layer": facts.exchanges_per_layer, "weight_bytes_per_token": facts.traffic.weights,
                "kv_bytes_per_token": facts.traffic.kv, "position": facts.position, "bandwidth_gb_s": bandwidth,
                "predicted_tok_s": facts.predicted_tok_s(bandwidth), "source_lines": facts.source_lines,
                "resources": facts.resources, "tuned": dict(facts.tuned), "alternative": dict(facts.alternative), "gate": gate_json(gate),
            }
        )  # fmt: skip
        return
    out.print(f"{facts.model} for {facts.target}: {facts.dtype}, {workers_line(facts)}, context {facts.context}, {_size(facts.file_bytes)} on disk", markup=False)
    out.print(_stage_table(facts))
    out.print(f"layers               {facts.layers}, in {facts.source_lines} lines of source")
    if facts.resources_line:
        out.print(f"resources            {facts.resources_line}", markup=False)
    if facts.alternative:
        out.print(f"alternative          {_values(facts.alternative)}: else the kernel would not fit into registers", markup=False)
    if facts.tuned:
        out.print(f"tuned                {_values(facts.tuned)}", markup=False)
    out.print(f"exchanges per layer  {facts.exchanges_per_layer:.1f}")
    if facts.ranks > 1:
        out.print(f"between ranks        {facts.rank_exchanges} exchanges a token")
    out.print(f"bytes per token      {_size(facts.traffic.weights)} of weights + {_size(facts.traffic.kv)} of KV cache at position {facts.position}")
    out.print(f"predicted            {facts.predicted_tok_s(bandwidth):.0f} tok/s if {bandwidth:g} GB/s stream without gaps (choose with --bandwidth)")
    out.print(gate_line(gate), markup=False)


def _values(values: Mapping[str, int]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values.items())


def _stage_table(facts: Any) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("loop", "stage", "kind", "waits for"):
        table.add_column(name)
    table.add_column("weights/token", justify="right")
    for row in facts.stages:
        loop = f"{row.segment} ×{row.count}" if row.count > 1 else row.segment
        table.add_row(loop, row.name, row.kind, ", ".join(row.waits_for), _size(row.bytes))
    return table


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
