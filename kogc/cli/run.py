"""``kogc run``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kogc.cli.console import err, print_json, steps
from kogc.cli.gate import gate_json
from kogc.cli.options import examples, read_ids
from kogc.errors import BadInput

#: Version of the object that ``--json`` prints.
JSON_SCHEMA = 1

EPILOG = examples(
    "kogc run model.kog --prompt 'def fib(n):' --max-tokens 64",
    "kogc run model.kog --ids 1,403,12 --json",
)


def register(app: typer.Typer) -> None:
    app.command("run", epilog=EPILOG)(command)


def command(
    file: Annotated[Path, typer.Argument(metavar="F.kog", help="An artifact made by `kogc compile`.")],
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    ids: Annotated[str | None, typer.Option(metavar="1,2,3", help="Token ids to continue, for artifacts without tokenizer.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 128,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout at the end; the stream goes to stderr.")] = False,
) -> None:
    """Continue a prompt, greedily, and print the text as it comes. Running an artifact runs the program inside it."""
    if (prompt is None) == (ids is None):
        raise BadInput("give either --prompt TEXT or --ids 1,2,3")
    from kogc.artifact import load

    artifact = load(file)
    with steps() as progress:
        engine = artifact.engine(progress=progress)
    with engine:
        generation = engine.generate(prompt if ids is None else read_ids(ids), max_tokens=max_tokens)
        with generation:
            stream(generation, sys.stderr if as_json else sys.stdout, as_text=artifact.tokenizer is not None)
    report(artifact, generation, as_json)


def stream(generation: Any, to: Any, as_text: bool) -> None:
    """Write every token to ``to`` as soon as it is there: its text, or its id where there is no tokenizer."""
    for token in generation:
        to.write(token.text if as_text else f"{token.id} ")
        to.flush()
    to.write("\n")
    to.flush()


def report(artifact: Any, generation: Any, as_json: bool) -> None:
    """Say how it went: speed only beside a passed gate, and with the share of the bandwidth ceiling."""
    from kogc.speed import measured_speed

    speed = measured_speed(artifact, generation.stats)
    if as_json:
        print_json(
            {
                "schema": JSON_SCHEMA,
                "prompt_ids": generation.prompt_ids,
                "ids": generation.ids,
                "text": generation.text if artifact.tokenizer is not None else None,
                "finish_reason": generation.finish_reason,
                "ttft_s": generation.stats.ttft_s,
                "decode_tok_s": speed.tok_s,
                "ceiling_share": speed.ceiling_share,
                "gate": gate_json(speed.gate),
            }
        )
    else:
        err.print(f"kogc: {speed.line}", markup=False, style="dim")
