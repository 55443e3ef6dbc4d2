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
    "kogc run model.kog --prompt 'Once' --temperature 0.8 --top-p 0.95 --seed 7",
    "kogc run model.kog --ids 1,403,12 --json",
)


def register(app: typer.Typer) -> None:
    app.command("run", epilog=EPILOG)(command)


def command(
    file: Annotated[Path, typer.Argument(metavar="F.kog", help="An artifact made by `kogc compile`.")],
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    ids: Annotated[str | None, typer.Option(metavar="1,2,3", help="Token ids to continue, for artifacts without tokenizer.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="How evenly tokens are drawn; 0 takes the likeliest one.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that have this share together.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from so many of the likeliest tokens; 0: from all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Draw from tokens at least this likely, the likeliest one counted as 1.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same tokens.")] = None,
    logprobs: Annotated[int | None, typer.Option(metavar="N", help="Report log-probabilities: the chosen token's and the N largest (with --json).")] = None,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: tokens seen before become less likely.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Taken from the logits of tokens generated before.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="Taken from them for every time.")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer and is not shown; more than once for more texts.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end-of-text token.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout at the end; the stream goes to stderr.")] = False,
) -> None:
    """Continue a prompt, greedily unless told otherwise, and print the text as it comes. Running an artifact runs the program inside it."""
    if (prompt is None) == (ids is None):
        raise BadInput("give either --prompt TEXT or --ids 1,2,3")
    from kogc.artifact import load
    from kogc.runtime.sampling import SamplingParams

    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, logprobs=logprobs, max_tokens=max_tokens, stop=stop,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty, ignore_eos=ignore_eos,
    )  # fmt: skip
    artifact = load(file)
    with steps() as progress:
        engine = artifact.engine(progress=progress)
    with engine:
        generation = engine.generate(prompt if ids is None else read_ids(ids), sampling=params)
        with generation:
            tokens = stream(generation, sys.stderr if as_json else sys.stdout, as_text=artifact.tokenizer is not None)
    report(artifact, generation, as_json, None if logprobs is None else [logprobs_json(token) for token in tokens])


def stream(generation: Any, to: Any, as_text: bool) -> list[Any]:
    """Write every token to ``to`` as soon as it is there: its text, or its id where there is no tokenizer. All of them in the end."""
    tokens = []
    for token in generation:
        tokens.append(token)
        to.write(token.text if as_text else f"{token.id} ")
        to.flush()
    to.write("\n")
    to.flush()
    return tokens


def logprobs_json(token: Any) -> dict[str, Any]:
    """A token's log-probabilities for ``--json``."""
    return {"id": token.id, "logprob": token.logprobs.chosen, "top": [{"id": other, "logprob": value} for other, value in token.logprobs.top]}


def report(artifact: Any, generation: Any, as_json: bool, logprobs: list[dict[str, Any]] | None = None) -> None:
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
                "seed": generation.seed,
                **({} if logprobs is None else {"logprobs": logprobs}),
                "ttft_s": generation.stats.ttft_s,
                "decode_tok_s": speed.tok_s,
                "ceiling_share": speed.ceiling_share,
                "gate": gate_json(speed.gate),
            }
        )
    else:
        err.print(f"kogc: {speed.line}", markup=False, style="dim")
