"""``kogc demo``: the first minute."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kogc.cli.console import err, out, steps
from kogc.cli.gate import gate_line
from kogc.cli.options import examples

EPILOG = examples("kogc demo", "kogc demo --prompt 'class Stack:' --max-tokens 300")


def register(app: typer.Typer) -> None:
    app.command("demo", epilog=EPILOG)(command)


def command(
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "def read_config(path):\n",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 200,
) -> None:
    """Compile the small Laneformer that ships with kogc, hold it against PyTorch, and let it write some Python."""
    from kogc import demo
    from kogc.cli.run import stream
    from kogc.speed import measured_speed

    out.print("1. compile the shipped checkpoint: a 4-lane Laneformer trained on Python's standard library")
    with steps() as progress:
        done = demo.compile_demo(progress)
    artifact = done.artifact
    how = "unchanged since last time" if done.cached else f"took {done.seconds:.1f} s"
    lines = artifact.source.count("\n")
    out.print(f"   {artifact.path} ({how}): {lines} lines of C++, {artifact.manifest.workers} workers", markup=False)
    out.print("2. " + gate_line(done.gate, done.gate_note), markup=False)
    out.print("3. generate\n")
    with artifact.engine() as engine:
        generation = engine.generate(prompt, max_tokens=max_tokens)
        out.print(prompt, end="", markup=False, style="bold")
        stream(generation, sys.stdout, as_text=True)
    out.print(f"\n   {measured_speed(artifact, generation.stats).line}", markup=False)
    out.print(f"\nLook inside: kogc inspect {artifact.path} --source", markup=False)
    err.file.flush()
