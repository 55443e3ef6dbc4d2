#!/usr/bin/env python
"""Small h200 kernels under NVIDIA's compute-sanitizer: no access out of bounds (memcheck), nothing read that was never written (initcheck).

Compiles each model with random weights, generates and computes logits under each tool, and prints one table. Exits with 1 when a
tool finds anything or a run does not come to its end. Needs the GPU; not part of the tests.

    python bench/sanitize.py
    python bench/sanitize.py --only llama-tiny --dtype fp32 --tool memcheck
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kogc.compiler import compile_model
from kogc.models.presets import PRESETS
from kogc.targets.h200.cuda_files import find_program
from table import Row, line, markdown

MODELS, TOOLS, DTYPES = ("llama-tiny", "laneformer-tiny"), ("memcheck", "initcheck"), ("fp16", "bf16", "fp32")
CHILD = Path(__file__).with_name("sanitize_child.py")
SHOWN_LINES = 40


def main() -> None:
    options = parse_options()
    sanitizer = options.sanitizer or [str(find_program("compute-sanitizer") or "")]
    if not sanitizer[0]:
        sys.exit("there is no compute-sanitizer: neither in a CUDA toolkit (set CUDA_HOME) nor on the path; it comes with the toolkit")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kogc-sanitize-") as folder:
        for name in options.only or MODELS:
            path = Path(folder) / f"{name}.kog"
            compile_model(f"preset:{name}", "h200", output=path, dtype=options.dtype, random_weights=True, gate=False)
            for tool in options.tool or TOOLS:
                rows.append(checked(f"{name} {options.dtype}: {tool}", [*sanitizer, "--tool", tool], path, options.tokens, options.seconds))
                print(line(rows[-1]), flush=True)
    print("", markdown(rows), sep="\n")
    sys.exit(0 if all(row.met for row in rows) else 1)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=PRESETS, metavar="PRESET", help=f"this model instead of {', '.join(MODELS)}; may be repeated")
    parser.add_argument("--dtype", default="fp16", choices=DTYPES)
    parser.add_argument("--tool", action="append", metavar="TOOL", help=f"instead of {' and '.join(TOOLS)}; may be repeated")
    parser.add_argument("--tokens", type=int, default=24, help="to generate; a step takes up to a second here (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=180, help="for one model under one tool (default: %(default)s)")
    parser.add_argument("--sanitizer", type=shlex.split, metavar="COMMAND", help="another compute-sanitizer than the one that is found")
    return parser.parse_args()


def checked(name: str, command: list[str], artifact: Path, tokens: int, seconds: float) -> Row:
    """Run the artifact under a tool; the errors that it found. A run that comes to no good end counts as one."""
    log = artifact.with_suffix(".log")
    log.write_text("")
    command = [*command, "--log-file", str(log), "--print-limit", "10", sys.executable, "-P", str(CHILD), str(artifact), str(tokens), str(seconds)]
    began = time.monotonic()
    said, ended = run_to_end(command, 2 * seconds)
    report = log.read_text(errors="replace")
    errors = found_errors(report)
    if errors or not ended:
        print(*(report + said).strip().splitlines()[:SHOWN_LINES], sep="\n", file=sys.stderr, flush=True)
    note = f"{tokens} tokens, {time.monotonic() - began:.0f} s" + ("" if ended else "; the run did not come to its end")
    return Row(name, max(errors, 0 if ended else 1), "errors", 0, least=False, note=note)


def run_to_end(command: list[str], seconds: float) -> tuple[str, bool]:
    """What the command and all its processes say, and whether they came to a good end within that time."""
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        said, _ = child.communicate(timeout=seconds)
    except BaseException as error:
        os.killpg(child.pid, signal.SIGKILL)
        said, _ = child.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return f"{said}stopped after {seconds:.0f} s", False
    return said, child.returncode == 0 and "all tokens are there" in said


def found_errors(report: str) -> int:
    """Errors that a report of the sanitizer adds up; 1 for a report without a sum, whatever went wrong there."""
    sums = re.findall(r"ERROR SUMMARY: (\d+) error", report)
    return sum(map(int, sums)) if sums else 1


if __name__ == "__main__":
    main()
