"""``kogc tune``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kogc.cli.console import out, print_json, steps
from kogc.cli.options import examples

EPILOG = examples(
    "kogc tune model.kog                             (measures, and writes model.kog again if something is faster)",
    "kogc tune model.kog -o tuned.kog                (leaves model.kog as it is)",
    "kogc tune model.kog --context 4096 --runs 5     (for long contexts, on a machine that is not quiet)",
    "kogc tune model.kog --json",
)


def register(app: typer.Typer) -> None:
    app.command("tune", epilog=EPILOG)(command)


def command(
    file: Annotated[Path, typer.Argument(metavar="F.kog", help="An artifact whose accuracy gate has passed on this machine.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The artifact to write; by default F.kog itself.")] = None,
    tokens: Annotated[int | None, typer.Option(min=2, help="Tokens generated in a run; by default 64.")] = None,
    context: Annotated[int | None, typer.Option(min=1, help="Positions in front of them; by default 1024, or half of what the artifact has.")] = None,
    runs: Annotated[int, typer.Option(min=3, help="Runs of either kernel in a comparison, an odd number.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of text.")] = False,
) -> None:
    """Measure the target's few knobs on this machine and store the fastest kernel in the artifact.

    Candidates are built from the artifact's own source and must have the same logits, bit by bit. One is kept when it is faster
    by more than its runs lie apart; where none is, the file is not touched.
    """
    from kogc.artifact import load
    from kogc.tune import tune

    with steps() as progress:
        done = tune(load(file), output, tokens=tokens, context=context, runs=runs, progress=progress)
    if as_json:
        print_json(done.to_json())
        return
    out.print(_table(done.trials))
    for trial in done.trials:
        if trial.note:
            out.print(f"skipped {trial.knob} = {trial.value}: {trial.note}", markup=False)
    out.print(_speed_line(done), markup=False)
    out.print(_end_line(done, file, output or file), markup=False)


def _table(trials: Any) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("knob", no_wrap=True)
    for name in ("value", "tok/s", "best yet", "ratio", "spread"):
        table.add_column(name, justify="right")
    table.add_column("kept")
    for trial in trials:
        speeds = trial.comparison
        figures = (f"{speeds.tok_s:.1f}", f"{speeds.base_tok_s:.1f}", f"{speeds.ratio:.3f}", f"{speeds.spread:.3f}") if speeds else ("", "", "", "")
        table.add_row(trial.knob, str(trial.value), *figures, _kept(trial))
    return table


def _kept(trial: Any) -> str:
    if trial.comparison is None:
        return "skipped"
    if trial.kept:
        return "yes"
    return "no (spread)" if trial.comparison.ratio > 1 else "no"


def _speed_line(done: Any) -> str:
    from kogc.speed import beside_ceiling, gate_words

    if done.tok_s is None:
        return "no candidate could be measured"
    where = f"{done.load.tokens} tokens behind {done.load.context}, median of {done.load.runs} runs"
    return f"{done.tok_s:.1f} tok/s = {beside_ceiling(done.ceiling_share)} ({where}), {gate_words(done.gate)}"


def _end_line(done: Any, file: Path, output: Path) -> str:
    if done.written:
        values = ", ".join(f"{name} = {value} (was {done.start[name]})" for name, value in done.tuned.items())
        return f"{output}: {values}, {done.final.ratio:.3f} × as fast as before"
    lost = "what was faster on the way did not stay so when measured again" if done.final else "nothing is faster by more than the runs' spread"
    return f"{lost}; {output} was not {'touched' if output == file else 'written'}"
