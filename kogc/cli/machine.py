"""``kogc targets`` and ``kogc doctor``."""

from __future__ import annotations

import tomllib
from importlib import resources
from typing import Annotated, Any

import typer

from kogc.cli.console import out, print_json
from kogc.cli.options import examples

_COLOURS = {"ok": "green", "note": "yellow", "bad": "red"}


def register(app: typer.Typer) -> None:
    app.command("targets", epilog=examples("kogc targets", "kogc targets --json"))(targets)
    app.command("doctor", epilog=examples("kogc doctor", "KOGC_CXX=zig kogc doctor", "KOGC_NVCC=nvrtc kogc doctor", "KOGC_GPU=1 kogc doctor"))(doctor)


def targets(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object: every target's target.toml.")] = False,
) -> None:
    """List the machines kogc compiles for."""
    found = known_targets()
    if as_json:
        print_json(found)
        return
    for name, facts in found.items():
        out.print(f"{name:10s} {facts.get('title', '')}", markup=False)


def known_targets() -> dict[str, dict[str, Any]]:
    """Name → contents of its target.toml, of every folder in kogc.targets that has one."""
    files = ((folder.name, folder / "target.toml") for folder in resources.files("kogc.targets").iterdir() if folder.is_dir())
    return {name: tomllib.loads(file.read_text("utf-8")) for name, file in sorted(files) if file.is_file()}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Show what was found on this machine: compilers, packages, folders. Exit code 1 when kogc cannot work here."""
    from kogc.doctor import examine

    findings = examine()
    if as_json:
        print_json({"findings": [vars(finding) for finding in findings]})
    else:
        for finding in findings:
            mark = f"[{_COLOURS[finding.level]}]{finding.level:4s}[/]"
            out.print(f"{mark} {finding.what:10s} ", end="")
            out.print(finding.text, markup=False)
    raise typer.Exit(1 if any(finding.level == "bad" for finding in findings) else 0)
