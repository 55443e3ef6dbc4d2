"""The GPU bench on the cpu target: the same path with a tiny model, so that no device time is spent on finding typing errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.full
def test_the_whole_path_on_the_cpu(tmp_path):
    command = [sys.executable, ROOT / "bench/h200.py", "--target", "cpu", "--workers", "2", "--only", "llama-tiny", "--quick", "--skip-peers", "--soak", "100", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "h200.json").read_text())
    (case,) = found["cases"]
    assert [gate["passed"] for gate in case["gates"]] == [True, True] and not found["failures"]
    assert len(set(case["soak"]["digests"])) == 1 and case["soak"]["tokens"] == 100
    assert [run["position"] for run in case["runs"]["64"]] == [62, 71]
    names = [row["name"].removeprefix("llama-tiny ") for row in found["rows"]]
    assert names == [
        "llama-tiny: gate", "llama-tiny: gate at 57", "fp16 at 64: decode", "fp16 at 64: share of the plain read",
        "llama-tiny: first token beyond its steps, in the kernel", "llama-tiny: first token beyond its steps, the call included",
        "llama-tiny: soak, equal repeats",
    ]  # fmt: skip
    assert all(name in done.stdout for name in names) and done.stdout.rstrip().splitlines()[-1].startswith("| llama-tiny: soak")
