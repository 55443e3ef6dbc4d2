"""Ctrl-C on the command line."""

import os
import signal
import subprocess
import sys
import time

import pytest

COMMAND = "import sys; from kogc.cli import main; main(sys.argv[1:])"


@pytest.mark.parametrize("after_s", [0.5, 4.0])
def test_ctrl_c_during_compile_leaves_nothing(tiny_pt, tmp_path, after_s):
    """Half a second is within the imports; four seconds are within tracing, or the build behind it."""
    command = [sys.executable, "-P", "-c", COMMAND, "compile", tiny_pt, "-o", tmp_path / "tiny.kog", "--workers", "3"]
    environment = os.environ | {"KOGC_CACHE_DIR": str(tmp_path / "cache")}
    child = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True, env=environment)
    time.sleep(after_s)
    child.send_signal(signal.SIGINT)
    errors = child.communicate(timeout=60)[1]
    assert child.returncode == 130, errors
    assert "Traceback" not in errors
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert not [path for path in left if ".part" in path.name or path.suffix == ".kog"], left
