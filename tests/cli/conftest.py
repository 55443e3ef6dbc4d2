"""The command line run inside the test process, and one small artifact to run it on."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_model import save_tiny

from kogc.cli import main

@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a command left: its exit code and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The one line of an error. Fails where stderr holds a traceback or more than that line and progress notes."""
        lines = [line for line in self.err.splitlines() if line.strip() and not line.rstrip().endswith("…")]
        assert len(lines) == 1 and "Traceback" not in self.err, self.err
        return lines[0]


@pytest.fixture
def kogc(capfd, monkeypatch) -> Callable[..., Outcome]:
    """``kogc("run", path, …)``: runs the command line in this process."""
    monkeypatch.delenv("KOGC_DEBUG", raising=False)

    def run(*arguments: object) -> Outcome:
        capfd.readouterr()
        code = 0
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as leaving:
            code = leaving.code or 0
        return Outcome(code, *capfd.readouterr())

    return run


@pytest.fixture(scope="session")
def tiny_pt(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "tiny.pt")


@pytest.fixture(scope="session")
def _compiled(tiny_pt, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.kog"
    main_code = None
    try:
        main(["compile", str(tiny_pt), "-o", str(path), "--workers", "2"])
    except SystemExit as leaving:
        main_code = leaving.code
    assert not main_code
    return path


@pytest.fixture
def tiny_kog(_compiled, tmp_path) -> Path:
    """A copy of the compiled tiny model that the test may damage."""
    return Path(shutil.copy(_compiled, tmp_path / "tiny.kog"))
