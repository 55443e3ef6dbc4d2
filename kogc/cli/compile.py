"""``kogc compile``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kogc.cli.console import out, print_json, steps
from kogc.cli.gate import gate_json, gate_line
from kogc.cli.options import Dtype, TrustRemoteCode, examples
from kogc.cli.ranks import workers_line

EPILOG = examples(
    "kogc compile model.pt",
    "kogc compile SmolLM2-135M-Instruct.Q4_1.gguf --dtype fp16 -o smol.kog",
    "kogc compile preset:llama-3.2-1b --random-weights --target h200    (needs no GPU)",
    "kogc compile ./my-llama-folder --max-context 2048 --workers 4",
    "kogc compile preset:laneformer-2b --random-weights --dtype fp16",
    "kogc compile laneformer.pt --tp 2 --workers 4    (two ranks of four workers)",
    "kogc compile model.pt --dump-ir ir/    (every pass as text and JSON)",
)


def register(app: typer.Typer) -> None:
    app.command("compile", epilog=EPILOG)(command)


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A .pt, .pt2, .onnx or .gguf file, a Hugging Face folder, or preset:NAME.")],
    target: Annotated[str, typer.Option(help="What to compile for; `kogc targets` lists them.")] = "cpu",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The artifact to write; by default MODEL's name with .kog, here.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Storage type of weights and KV cache; by default the model's own.")] = None,
    max_context: Annotated[int | None, typer.Option(min=2, help="Positions the KV cache holds; by default the model's own limit.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Workers, baked in; by default one thread per core, or what the target says.")] = None,
    tp: Annotated[int, typer.Option(min=1, help="Ranks to cut the model over (tensor parallelism), baked in; --workers is for each of them.")] = 1,
    dump_ir: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the result of every pass into this folder.")] = None,
    random_weights: Annotated[bool, typer.Option("--random-weights", help="Make the weights up (seeded): for speed work on presets and folders without weights.")] = False,
    weights: Annotated[bool, typer.Option("--weights/--no-weights", help="With --no-weights: emit and build the code only.")] = True,
    allow_pickle: Annotated[bool, typer.Option("--allow-pickle", help="Read a pickled module, or a .pt2 of more than tensor ops: runs its code.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    tokenizer: Annotated[Path | None, typer.Option(metavar="PATH", help="A tokenizer.json to put into the artifact.")] = None,
    gate: Annotated[bool, typer.Option("--gate/--no-gate", help="Hold the compiled kernel against PyTorch before the artifact is written.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of text.")] = False,
) -> None:
    """Compile MODEL into one artifact: kernel source, binary, packed weights, tokenizer and the plan behind them."""
    from kogc.compiler import compile_model

    with steps() as progress:
        done = compile_model(
            model,
            target,
            output=output or default_output(model),
            dtype=dtype.value if dtype else None,
            max_context=max_context,
            workers=workers,
            tp=tp,
            dump_ir=dump_ir,
            random_weights=random_weights,
            weights=weights,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
            tokenizer=tokenizer,
            gate=gate,
            progress=progress,
        )
    if as_json:
        print_json(done.to_json() | {"gate": gate_json(done.gate)})
        return
    manifest = done.artifact.manifest
    state = "unchanged" if done.cached else f"compiled in {done.seconds:.1f} s"
    out.print(f"{done.artifact.path}: {manifest.model} for {manifest.target}, {manifest.dtype}, {workers_line(manifest)}, {state}", markup=False)
    out.print(gate_line(done.gate, done.gate_note), markup=False)
    run = f"kogc run {done.artifact.path} --prompt 'def '    or    " if weights else ""
    out.print(f"next: {run}kogc inspect {done.artifact.path} --source", markup=False)


def default_output(model: str) -> Path:
    """``models/tiny.pt`` → ``tiny.kog``, ``preset:llama-tiny`` → ``llama-tiny.kog``, in the current folder."""
    path = Path(model.removeprefix("preset:"))
    known = path.suffix.lower() in (".pt", ".pt2", ".pth", ".bin", ".gguf", ".safetensors", ".onnx")
    name = path.stem if known else path.resolve().name
    return Path(f"{name or 'model'}.kog")
