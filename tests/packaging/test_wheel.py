"""The wheel alone, installed somewhere else, compiles and runs a model."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_model import save_tiny

ROOT = Path(__file__).parents[2]
#: What a build reads; a copy, so that building leaves nothing in the checkout.
SOURCES = ("kogc", "ir", "models", "targets", "templates", "pyproject.toml", "README.md", "LICENSE")

SCRIPT = """
import sys
import kogc
assert kogc.__file__.startswith(sys.argv[1]), kogc.__file__
artifact = kogc.compile(sys.argv[2], output=sys.argv[3], workers=2)
with artifact.engine() as engine:
    print(*[token.id for token in engine.generate([1, 2, 3], max_tokens=4)])
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with nothing but the installed wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        origin = ROOT / name
        if origin.is_dir():
            shutil.copytree(origin, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(origin, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source], check=True)
    (wheel,) = folder.glob("*.whl")
    target = folder / "site"
    subprocess.run([*pip, "install", "--no-deps", "--no-compile", "--target", target, wheel], check=True)
    return target


@pytest.mark.compiler
def test_the_wheel_compiles_a_model(installed, tmp_path):
    model = save_tiny(tmp_path / "tiny.pt")
    command = [sys.executable, "-P", "-c", SCRIPT, installed, model, tmp_path / "tiny.kog"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(installed)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 4


def test_the_wheel_holds_what_the_code_reads(installed):
    package = installed / "kogc"
    for name in ("py.typed", "templates/kernel.j2", "targets/cpu/target.toml", "models/checkpoints/pylane.pt"):
        assert (package / name).is_file(), name
    assert not (installed / "tests").exists()
