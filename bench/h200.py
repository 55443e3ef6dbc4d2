#!/usr/bin/env python
"""What kogc reaches on an H200, beside a plain read of the same bytes and PyTorch, all in one run of at most eight minutes.

Compiles every shape with random weights, holds it against PyTorch in fp32 on the GPU (from an empty context and behind a full
one), and only then decodes at the contexts asked for, between plain reads; profiles the stages, and times torch.compile in a
CUDA graph on the same module. Every row is printed as soon as it is known, and the table at the end. Not part of the tests.

    python bench/h200.py --out results               # everything
    python bench/h200.py --only llama-3.2-1b --soak 50000
    python bench/h200.py --target cpu --only llama-tiny --quick --skip-peers     # does it run?
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import tempfile
import time
import traceback
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch
from gpu_cases import Asked, Case, chosen_cases
from gpu_compile import Compiles, Made
from gpu_decode import PROMPT, Plan, decode_runs, fill, first_token, median, plain_reads, soak
from gpu_gate import Reference, gate, gate_behind, random_ids
from gpu_peers import as_peer, token_us
from kogc.artifact import Artifact
from kogc.machine import cpu_model
from kogc.runtime.engine import Engine
from kogc.stage_picture import picture
from kogc.stage_profile import profile_stages, table
from kogc.verify import GateResult
from table import Row, line, markdown

FULL, QUICK = Plan(128, 3), Plan(8, 2)
#: The prompt before the tokens whose stages are profiled is this much shorter than the context.
PROFILED = 8
#: torch.compile of a whole model takes up to this many seconds: with less left it is not begun.
PEER_S = 60
SOAK_REPEATS = 3
FIRST_TOKEN_US, FIRST_TOKENS = 50, 9


class Report:
    """Everything that was found, printed and written down as it comes. ``folder``: where files go, if anywhere."""

    def __init__(self, folder: Path | None, target: str) -> None:
        self.rows: list[Row] = []
        self.cases: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self._folder, self._began = folder, time.monotonic()
        self._facts = {"date": date.today().isoformat(), "target": target, "torch": torch.__version__, "python": platform.python_version(), "machine": _machine()}
        if folder:
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return time.monotonic() - self._began

    def row(self, row: Row) -> None:
        self.rows.append(row)
        print(f"[{self.seconds:5.1f} s] {line(row)}", flush=True)
        self._save()

    def tell(self, what: str) -> None:
        print(f"[{self.seconds:5.1f} s] {what}", file=sys.stderr, flush=True)

    def failed(self, what: str) -> None:
        """Something that did not come to an end; the run goes on with the next."""
        self.failures.append(what)
        print(f"[{self.seconds:5.1f} s] FAILED {what}", flush=True)
        self._save()

    def file(self, name: str, text: str) -> None:
        """A file of its own beside the rows."""
        if self._folder:
            (self._folder / name).write_text(text, encoding="utf-8")

    def end(self) -> int:
        """Print the table; the exit code: 0 when everything came to an end and is as required."""
        print("", "  ".join(f"{name} {value}" for name, value in self._facts.items()), "", markdown(self.rows), sep="\n", flush=True)
        self._save()
        return 1 if self.failures or any(row.met is False for row in self.rows) else 0

    def _save(self) -> None:
        found = {"facts": self._facts, "seconds": round(self.seconds, 1), "rows": [row.to_json() for row in self.rows], "cases": self.cases, "failures": self.failures}
        self.file("h200.json", json.dumps(found, indent=1))


def main() -> None:
    options = parse_options()
    torch.set_float32_matmul_precision("highest")
    report, cases = Report(options.out, options.target), chosen_cases(options.only, options.context)
    with tempfile.TemporaryDirectory(dir=options.scratch, prefix="kogc-bench-") as folder, Compiles(cases, options.target, options.workers, Path(folder)) as compiles:
        for case in cases:
            if report.seconds > options.seconds:
                report.failed(f"{case.preset}: not begun, {options.seconds:.0f} seconds are over")
                continue
            try:
                run_case(case, compiles.result(case), options, report)
            except Exception as error:  # whatever one shape does, the next ones are measured
                traceback.print_exc()
                report.failed(f"{case.preset}: {type(error).__name__}: {error}")
            finally:
                (Path(folder) / f"{case.preset}.kog").unlink(missing_ok=True)
                release_memory()
    code = report.end()
    sys.exit(0 if options.quick and not report.failures else code)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="PRESET", help="this shape alone; may be repeated, and may name any preset")
    parser.add_argument("--context", type=int, help="decode at this position instead")
    parser.add_argument("--target", default="h200", choices=("h200", "cpu"), help="cpu: to try the script where there is no GPU")
    parser.add_argument("--workers", type=int, help="instead of the target's own number")
    parser.add_argument("--quick", action="store_true", help="few tokens: does it run, not how fast")
    parser.add_argument("--skip-peers", action="store_true", help="no PyTorch speeds")
    parser.add_argument("--soak", type=int, default=0, metavar="N", help=f"also generate N tokens {SOAK_REPEATS} times with the first shape and compare")
    parser.add_argument("--seconds", type=float, default=440, help="begin nothing long after so many seconds (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder for h200.json and the profiles as text and picture")
    parser.add_argument("--scratch", type=Path, help="where temporary artifacts go, 28 GB in a full run (default: the system's temporary folder)")
    return parser.parse_args()


# ── one shape ──


def run_case(case: Case, made: Made, options: argparse.Namespace, report: Report) -> None:
    """Gate, speeds, profile and peers of one compiled shape."""
    artifact, plan, device = Artifact(made.path, intact=True), QUICK if options.quick else FULL, "cuda" if options.target == "h200" else "cpu"
    found: dict[str, Any] = {"preset": case.preset, "dtype": case.dtype, "compile": asdict(made) | {"path": str(made.path)}, "manifest": artifact.manifest.meta}
    report.cases.append(found)
    report.tell(f"{case.preset}: compiled in {made.seconds:.0f} s {made.steps}, loading the reference")
    reference = Reference(case, artifact, device)
    report.tell(f"{case.preset}: uploading")
    with artifact.engine() as engine:
        speeds = measure(case, engine, reference, plan, found, report)
        if options.soak and len(report.cases) == 1:
            soaked = soak(engine, options.soak, SOAK_REPEATS, report.tell)
            found["soak"] = asdict(soaked)
            report.row(Row(f"{case.preset}: soak, equal repeats", len(set(soaked.digests)), "digest", 1, least=False, note=f"{SOAK_REPEATS} × {soaked.tokens} tokens"))
    if speeds is None:
        return
    if "KOGC_PROFILE" in artifact.source:
        profile(case, artifact, report)
    if not options.skip_peers:
        peers(case, reference, speeds, options.seconds, found, report)


def measure(case: Case, engine: Engine, reference: Reference, plan: Plan, found: dict[str, Any], report: Report) -> float | None:
    """Speeds at all contexts, each behind a passed gate; µs a token at the first, None when the gate fails there."""
    found["gates"], found["runs"] = [], {}
    if not passed(f"{case.preset}: gate", gate(engine, reference), found, report):
        return None
    first = None
    with plain_reads(engine.artifact) as reads:
        for asked in case.asked:
            with engine.session() as session:
                report.tell(f"{case.preset}: filling a context of {asked.context}")
                fill(engine, session, asked.context, plan)
                if passed(f"{case.preset}: gate at {len(session.ids)}", gate_behind(engine, session, reference), found, report):
                    runs = decode_runs(engine, session, plan, reads)
                    found["runs"][asked.context] = [asdict(run) | {"share": run.share} for run in runs]
                    us = speed_rows(case, asked, runs, engine.artifact, report)
                    first = us if asked is case.asked[0] else first
    if first is None:
        return None
    overhead = first_token(engine, FIRST_TOKENS)
    for where, us in (("in the kernel", overhead.kernel), ("the call included", overhead.call)):
        report.row(Row(f"{case.preset}: first token beyond its steps, {where}", us, "µs", FIRST_TOKEN_US, least=False, note=f"median of {FIRST_TOKENS}, prompts of {PROMPT} tokens"))
    return first


def passed(name: str, result: GateResult, found: dict[str, Any], report: Report) -> bool:
    """Report a gate."""
    found["gates"].append(result.to_json())
    note = result.problem or f"passed, {result.positions} positions, next token checked at {result.argmax_checked}, {result.runs} runs equal"
    report.row(Row(name, result.rel_rmse, "", result.limit, least=False, note=note))
    if not result.passed:
        report.failed(f"{name}: {result.problem}; no speed is measured")
    return result.passed


def speed_rows(case: Case, asked: Asked, runs: list, artifact: Artifact, report: Report) -> float:
    """Report the median run at one context; its µs a token."""
    run, name = median(runs), f"{case.preset} {case.dtype} at {asked.context}"
    is_first = asked is case.asked[0]
    waits = sum(bool(stage.operands) for *_, stage in artifact.program.instances())
    rate = run.bytes_per_token / run.us * 1e-6
    report.row(Row(f"{name}: decode", 1e6 / run.us, "tok/s", case.tok_s if is_first else None, note=f"{run.us:.1f} µs a token, {rate:.3f} TB/s, {run.us / waits:.2f} µs for each of {waits} waits"))
    spread = ", ".join(f"{100 * each.share:.1f}" for each in runs)
    report.row(Row(f"{name}: share of the plain read", 100 * run.share, "%", asked.share, note=f"of {run.ceiling * 1e-12:.3f} TB/s; runs: {spread}"))
    return run.us


def profile(case: Case, artifact: Artifact, report: Report) -> None:
    """Write down where the time of a token at the first context goes."""
    context = case.asked[0].context
    result = profile_stages(artifact, random_ids(artifact.manifest.vocab, context - PROFILED, seed=5), 2 * PROFILED)
    report.cases[-1]["profile"] = asdict(result)
    report.file(f"profile-{case.preset}.svg", picture(result))
    report.file(f"profile-{case.preset}.md", table(result) + "\n")
    print(table(result), flush=True)


def peers(case: Case, reference: Reference, us: float, seconds: float, found: dict[str, Any], report: Report) -> None:
    """Time PyTorch on the reference's own module, which is narrowed for it."""
    context, found["peers"] = case.asked[0].context, {}
    module = as_peer(reference.module, {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[case.dtype], context)
    release_memory()
    for compiled, limit in ((False, None), (True, case.ratio)):
        name = "torch.compile" if compiled else "torch eager"
        if compiled and report.seconds + PEER_S > seconds:
            report.failed(f"{case.preset}: no time left for {name}")
            continue
        theirs = found["peers"][name] = token_us(module, context, compiled)
        report.row(Row(f"{case.preset}: {name} in a CUDA graph", 1e6 / theirs, "tok/s", note=f"{theirs:.1f} µs a token at {context}"))
        report.row(Row(f"{case.preset}: kogc / {name}", theirs / us, "×", limit))
    torch.compiler.reset()


def release_memory() -> None:
    """Give back what the last shape held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _machine() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_model()


if __name__ == "__main__":
    main()
