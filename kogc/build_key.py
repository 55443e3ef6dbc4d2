"""Whether an artifact is still what a compile would make: a key over everything that goes into it."""

from __future__ import annotations

import json
from functools import cache
from importlib import import_module
from pathlib import Path

from kogc import __version__
from kogc.artifact import Artifact, load
from kogc.cache import content_key
from kogc.errors import ArtifactError
from kogc.frontend.model_input import ModelInput
from kogc.targets import Target
from kogc.targets.toolchains import load_toolchain

#: The packages whose code decides what comes out.
_PACKAGES = ("kogc", "kogc.ir", "kogc.models", "kogc.targets", "kogc.templates")
_SUFFIXES = (".py", ".j2", ".h", ".cu", ".cuh", ".toml")


def build_key(model: ModelInput, target: Target, dtype: str, workers: int, ranks: int, weights: bool) -> str:
    """32 hex digits that change with the model, the options, kogc's own code, the compiler and the processor."""
    options = {
        "model": model.identity,
        "context": model.context,
        "target": target.name,
        "machine": target.title,
        "tile_rows": target.tile_rows,
        "dtype": dtype,
        "workers": workers,
        "ranks": ranks,
        "weights": weights,
        "toolchain": load_toolchain(target.name).toolchain_facts(),
        "kogc": __version__,
        "source": _source_digest(),
    }
    return content_key(json.dumps(options, sort_keys=True, default=str))


def unchanged(path: Path, key: str, needs_gate: bool) -> Artifact | None:
    """The artifact at ``path`` if it was made from the inputs behind ``key`` and is whole, else None.

    ``needs_gate``: only if it also says that its gate passed.
    """
    if not path.exists():
        return None
    try:
        artifact = load(path)
        if artifact.manifest.build_key == key and (not needs_gate or (artifact.manifest.gate or {}).get("passed")):
            artifact.verify_hashes()
            return artifact
    except ArtifactError:
        pass  # damaged, or no artifact at all: it is about to be replaced
    return None


@cache
def _source_digest() -> str:
    """Over every file of kogc that takes part in a compile."""
    files = set()
    for package in _PACKAGES:
        folder = Path(import_module(package).__file__).parent
        files |= {(package, str(file.relative_to(folder)), file) for file in folder.rglob("*") if file.suffix in _SUFFIXES}
    parts = []
    for package, name, file in sorted(files):
        parts += [package, name, file.read_bytes()]
    return content_key(*parts)
