#!/usr/bin/env python
"""What kogc reaches on this CPU beside llama.cpp, PyTorch and a plain read of the same bytes, all in one run.

Compiles SmolLM2-135M-Instruct to fp16 (accuracy gate included), lets everybody continue the same prompt greedily in turns,
measures engine start, prompt speed and a longer context, and then what compiling preset:laneformer-2b costs. Prints one
table; needs an otherwise idle machine to mean anything. Not part of the tests.

llama.cpp runs in a venv of its own (--llama-python) that has llama-cpp-python, built without AMX:
    python -m venv bench-venv && CMAKE_ARGS="-DGGML_NATIVE=ON -DGGML_AMX=OFF" bench-venv/bin/pip install llama-cpp-python
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
from compile_cost import compile_cost
from decode import Rounds, measure
from engines import Contestant, Kogc, LlamaCpp, Torch
from gguf_f16 import write_f16
from kogc.artifact import Artifact
from kogc.compiler import compile_model
from kogc.frontend.load import load_model
from kogc.machine import cpu_model
from table import Row, markdown

HERE = Path(__file__).parent
WORKSPACE = HERE.parents[1]
THREADS = 2
CONTEXT = 2048
PROMPT = "The history of the lighthouse begins long before electricity. In the early days, sailors"
BIG_PRESET = "preset:laneformer-2b"
SMALL_PRESET = "preset:laneformer-tiny"


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    tokens: int
    rounds: int
    preset: str


FULL, QUICK = Plan(96, 5, BIG_PRESET), Plan(24, 2, SMALL_PRESET)


def main() -> None:
    options = parse_options()
    torch.set_num_threads(THREADS)
    plan = QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory(dir=options.scratch, prefix="kogc-bench-") as folder:
        rows = [] if options.only == "compile" else decode_rows(options, plan, Path(folder))
        rows += [] if options.only == "decode" else compile_rows(plan.preset, Path(folder))
    report(options, rows)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=WORKSPACE / "cache/SmolLM2-135M-Instruct.Q4_1.gguf", help="the GGUF file (default: %(default)s)")
    parser.add_argument("--llama-python", type=Path, default=WORKSPACE / "bench-venv/bin/python", help="Python that has llama-cpp-python; without it llama.cpp is left out (default: %(default)s)")
    parser.add_argument("--scratch", type=Path, help="where temporary artifacts go, 6 GB in a full run (default: the system's temporary folder)")
    parser.add_argument("--only", choices=("decode", "compile"), help="one half of the run")
    parser.add_argument("--quick", action="store_true", help="few tokens and rounds, no torch.compile, a tiny preset: does it run, not how fast")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of the table")
    return parser.parse_args()


# ── decoding ──


def decode_rows(options: argparse.Namespace, plan: Plan, folder: Path) -> list[Row]:
    """Speeds, start and gate of SmolLM2."""
    tell("compiling SmolLM2 to fp16, accuracy gate included")
    done = compile_model(options.model, output=folder / "smollm2.kog", dtype="fp16", max_context=CONTEXT, workers=THREADS)
    artifact, gate = done.artifact, done.gate
    start = [engine_start(artifact.path) for _ in range(3)]
    contestants = line_up(options, artifact)
    prompt = artifact.tokenizer.encode(PROMPT).ids
    rounds = measure(artifact, contestants, prompt, plan.tokens, plan.rounds, tell)
    for each in contestants:
        if isinstance(each, LlamaCpp):
            each.close()
    rows = [
        Row("accuracy gate: relative RMSE", gate.rel_rmse, "", gate.limit, least=False, note="passed" if gate.passed else str(gate.problem)),
        *speed_rows(rounds),
        Row("engine start", statistics.median(start), "s", 1.0, least=False, note=f"fresh process, median of {len(start)}; first {start[0]:.2f} s"),
    ]
    return rows + longer_rows(contestants[0], rounds, plan)


def line_up(options: argparse.Namespace, artifact: Artifact) -> list[Contestant]:
    """Everybody who takes part; kogc is the first."""
    contestants: list[Contestant] = [Kogc(artifact)]
    if options.llama_python.exists():
        tell("writing the F16 GGUF for llama.cpp")
        f16 = write_f16(options.model, options.model.with_name(options.model.name.replace("Q4_1", "F16-from-Q4_1")))
        contestants.append(LlamaCpp(options.llama_python, f16, THREADS, CONTEXT))
    else:
        tell(f"no {options.llama_python}: llama.cpp is left out")
    model = load_model(options.model, max_context=CONTEXT)
    contestants.append(Torch(model, torch.float16, compiled=False))
    if not options.quick:
        contestants.append(Torch(model, torch.float16, compiled=True))
        contestants += [Torch(model, dtype, compiled=True) for dtype in (torch.bfloat16, torch.float32)]
    return contestants


def speed_rows(rounds: Rounds) -> list[Row]:
    """Everybody's speed, and kogc's against what is asked of it."""
    gigabytes = rounds.bytes_per_token / 1e9
    ours = rounds.tok_s(Kogc.name)
    limits = {"llama.cpp": 1.5, "torch eager float16": 3.0, "torch compile float16": 1.5}
    rows = [
        Row("kogc decode", ours, "tok/s", note=f"{ours * gigabytes:.1f} GB/s at {gigabytes * 1e3:.0f} MB a token"),
        Row("plain read, two threads", statistics.median(rounds.reads) / 1e9, "GB/s", note="around every kogc run"),
        Row("kogc's share of the plain read", 100 * statistics.median(rounds.shares), "%", 85.0, note=_spread(rounds.shares)),
    ]
    for name in rounds.runs:
        if name != Kogc.name:
            rows.append(Row(f"{name} decode", rounds.tok_s(name), "tok/s", note=_agreement(rounds, name)))
            rows.append(Row(f"kogc / {name}", rounds.ratio(name), "×", limits.get(name)))
    return rows


def longer_rows(kogc: Contestant, rounds: Rounds, plan: Plan) -> list[Row]:
    """How fast a prompt goes in, and how fast decoding is behind it."""
    rows = []
    for length in (200, 1000):
        prompt = [1 + index * 37 % 40000 for index in range(length)]
        runs = [kogc.run(prompt, 32) for _ in range(plan.rounds)]
        speed = statistics.median(length / run.ttft_s for run in runs)
        rows.append(Row(f"prompt of {length} tokens", speed, "tok/s", note=f"{speed / rounds.tok_s(Kogc.name):.1f} × decode"))
        rows.append(Row(f"decode at context {length}", statistics.median(run.tok_s for run in runs), "tok/s"))
    return rows


def engine_start(path: Path) -> float:
    """Seconds from path to ready engine in a process that has only imported kogc."""
    return float(subprocess.run([sys.executable, HERE / "start_child.py", path], check=True, capture_output=True, text=True).stdout)


def _spread(shares: list[float]) -> str:
    return f"rounds: {min(shares):.0%} to {max(shares):.0%}"


def _agreement(rounds: Rounds, name: str) -> str:
    """How many tokens in a row are the same: the contestants run the same model."""
    ours, theirs = rounds.runs[Kogc.name][0].ids, rounds.runs[name][0].ids
    same = next((i for i, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1]), min(len(ours), len(theirs)))
    return f"first {same} of {len(theirs)} tokens as kogc's"


# ── compiling ──


def compile_rows(preset: str, folder: Path) -> list[Row]:
    """Time and memory of compiling ``preset`` with random weights, of its code alone, and of a second compile."""
    name = preset.removeprefix("preset:")
    tell(f"compiling {name}: code alone")
    code = compile_cost(preset, folder / "code.kog", "--no-weights")
    tell(f"compiling {name}: with weights")
    whole = compile_cost(preset, folder / "whole.kog")
    tell(f"compiling {name} again")
    again = compile_cost(preset, folder / "whole.kog")
    weights = whole.report["weight_bytes"]
    building = code.report["steps"].get("building the kernel", 0.0)
    slowest = sorted(whole.report["steps"].items(), key=lambda item: -item[1])[:3]
    return [
        Row(f"{name}: trace to source", code.report["seconds"] - building, "s", 15.0, least=False, note=f"and {building:.1f} s of C++ compiler, {code.report['import_s']:.1f} s of imports before"),
        Row(f"{name}: compile, packed", whole.report["seconds"], "s", 90.0, least=False, note=", ".join(f"{step} {s:.0f} s" for step, s in slowest)),
        Row(f"{name}: peak RSS / weights", whole.total / weights, "×", 1.3, least=False, note=f"{whole.total / 1e9:.2f} GB of {weights / 1e9:.2f} GB, mapped files included"),
        Row(f"{name}: peak anonymous RSS / weights", whole.peaks["RssAnon"] / weights, "×", note=f"{whole.peaks['RssAnon'] / 1e9:.2f} GB; mapped files peak at {whole.peaks['RssFile'] / 1e9:.2f} GB"),
        Row(f"{name}: second compile / first", again.report["seconds"] / whole.report["seconds"], "×", 0.5, least=False, note=f"{again.report['seconds']:.1f} s, {'reused' if again.report['cached'] else 'NOT reused'}"),
    ]


# ── the report ──


def report(options: argparse.Namespace, rows: list[Row]) -> None:
    """The table or JSON on stdout, and exit code 1 when something that is required was not reached."""
    facts = {"date": date.today().isoformat(), "cpu": cpu_model(), "cores": os.cpu_count(), "threads": THREADS, "load": os.getloadavg(), "torch": torch.__version__, "python": platform.python_version()}
    if options.json:
        print(json.dumps({"machine": facts, "rows": [row.to_json() for row in rows]}, indent=1))
    else:
        print("  ".join(f"{name} {value}" for name, value in facts.items()), markdown(rows), sep="\n\n")
    sys.exit(0 if all(row.met is not False for row in rows) or options.quick else 1)


def tell(what: str) -> None:
    print(f"bench: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
