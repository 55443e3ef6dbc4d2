"""What every target's ``toolchain`` module offers to the compiler, the runtime and ``kogc inspect``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast


class Toolchain(Protocol):
    """From emitted source to a binary, and back to text. All raise ToolchainError when something is not installed."""

    #: Names of the artifact's members.
    SOURCE_MEMBER: str
    BINARY_MEMBER: str

    def build(self, source: str, defines: Sequence[str] = ()) -> Path:
        """The binary of ``source``, from the cache if it was built before."""
        ...

    def binary_facts(self, binary: Path) -> dict[str, Any]:
        """What the manifest's ``meta`` records of a binary that ``build`` returned. Raises PlanRejected for one that must not be used."""
        ...

    def describe(self, facts: Mapping[str, Any]) -> str | None:
        """``binary_facts`` in one line, if there is something to say."""
        ...

    def disassemble(self, binary: bytes) -> str:
        """The machine code of ``binary`` as text."""
        ...

    def toolchain_facts(self) -> dict[str, Any]:
        """How binaries are made here, and for what: for the manifest."""
        ...

    def required_features(self) -> tuple[str, ...]:
        """CPU features that a binary needs."""
        ...


def load_toolchain(target: str) -> Toolchain:
    """The toolchain of the target of that name."""
    return cast(Toolchain, import_module(f"kogc.targets.{target}.toolchain"))
