"""Ctrl-C on the command line."""

import os
import signal
import subprocess
import sys
import time

import pytest

COMMAND = "import sys; from kogc.cli import main; main(sys.argv[1:])"


def wait_for_files(folder, child):
    limit = time.monotonic() + 60
    while not any(path.is_file() for path in folder.rglob("*")):
        assert child.poll() is None and time.monotonic() < limit
        time.sleep(0.01)


@pytest.mark.parametrize("moment", ["imports", "build"])
def test_ctrl_c_during_compile_leaves_nothing(tiny_pt, tmp_path, moment):
    """Half a second is within the imports; what appears in the cache first is the compiler's."""
    command = [sys.executable, "-P", "-c", COMMAND, "compile", tiny_pt, "-o", tmp_path / "tiny.kog", "--workers", "3"]
    environment = os.environ | {"KOGC_CACHE_DIR": str(tmp_path / "cache")}
    child = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True, env=environment)
    if moment == "imports":
        time.sleep(0.5)
    else:
        wait_for_files(tmp_path / "cache", child)
    child.send_signal(signal.SIGINT)
    errors = child.communicate(timeout=60)[1]
    assert child.returncode == 130, errors
    assert "Traceback" not in errors
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert not [path for path in left if ".part" in path.name or path.suffix == ".kog"], left
