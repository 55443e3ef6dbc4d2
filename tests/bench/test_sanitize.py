"""The sanitizer's bench without a sanitizer and a GPU: what it makes of the reports of one, and of a run that ends badly."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kogc.targets.h200.cuda_files import find_program

ROOT = Path(__file__).parents[2]

#: Says that it found so many errors; ``$1`` is ``--tool`` and ``$4`` the log.
TOOL = """#!/bin/sh
[ "$1" = --tool ] && [ "$3" = --log-file ] || exit 9
printf '========= Invalid __global__ read of size 4 bytes\\n========= ERROR SUMMARY: %s\\n' "{found}" > "$4"
echo "{said}"
exit {code}
"""


def sanitize(folder: Path, found: str, said: str = "all tokens are there", code: int = 0, *options: str) -> subprocess.CompletedProcess:
    tool = folder / "tool"
    tool.write_text(TOOL.format(found=found, said=said, code=code))
    tool.chmod(0o755)
    return run("--only", "llama-tiny", "--sanitizer", str(tool), *options)


def run(*options: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "bench/sanitize.py", *options]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""} | environment)


pytestmark = pytest.mark.slow


def test_clean_reports_are_a_table_and_a_good_end(tmp_path):
    done = sanitize(tmp_path, "0 errors")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for row in done.stdout.splitlines() if row.startswith("| llama-tiny")]
    assert [row.split("|")[1].strip() for row in rows] == ["llama-tiny fp16: memcheck", "llama-tiny fp16: initcheck"]
    assert all("0 errors" in row and "yes" in row for row in rows)


def test_whatever_a_tool_finds_is_shown_and_fails(tmp_path):
    done = sanitize(tmp_path, "3 errors", "all tokens are there", 0, "--tool", "memcheck")
    assert done.returncode == 1 and "3 errors" in done.stdout and "NO" in done.stdout
    assert "Invalid __global__ read" in done.stderr


@pytest.mark.parametrize("said, code", [("all tokens are there", 1), ("a stall", 0)])
def test_a_run_that_ends_badly_fails_however_clean_its_report(tmp_path, said, code):
    done = sanitize(tmp_path, "0 errors", said, code, "--tool", "initcheck")
    assert done.returncode == 1 and "the run did not come to its end" in done.stdout


def test_without_a_sanitizer_there_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    if find_program("compute-sanitizer"):
        pytest.skip("a toolkit of this machine has a compute-sanitizer")
    done = run(PATH=str(tmp_path))
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("there is no compute-sanitizer") and len(done.stderr.strip().splitlines()) == 1
