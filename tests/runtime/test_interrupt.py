"""Ctrl-C and the interpreter's end, in a process of their own."""

import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.compiler

SCRIPT = """
import sys, threading
from kogc.artifact import load
engine = load(sys.argv[1]).engine()
generation = engine.generate([53], stall_timeout=60)
print("running", flush=True)
try:
    {body}
except KeyboardInterrupt:
    print("interrupted", [t.name for t in threading.enumerate() if t.name == "kogc-kernel"], generation.finish_reason, flush=True)
"""


def start(fake, body: str) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-P", "-c", SCRIPT.format(body=body), str(fake.path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "running\n"
    time.sleep(0.2)
    return process


def test_ctrl_c_cancels_and_joins(fake):
    process = start(fake, "next(generation)")
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=10)[0] == "interrupted [] cancelled\n"
    assert process.returncode == 0


def test_a_program_that_ends_does_not_wait_for_the_kernel(fake):
    process = start(fake, "pass")
    assert process.wait(timeout=10) == 0
