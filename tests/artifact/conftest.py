"""A small artifact of every kind of member, and how to damage it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kogc.artifact_manifest import Manifest, Section
from kogc.artifact_writer import ArtifactWriter

WEIGHTS = np.random.default_rng(0).integers(0, 256, 100_003, dtype=np.uint8)


@pytest.fixture
def weights() -> np.ndarray:
    """What ``write`` stores as rank 0."""
    return WEIGHTS


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """What one test remembers about files is not another's business."""
    monkeypatch.setenv("KOGC_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def manifest() -> Callable[..., Manifest]:
    def make(**changes: Any) -> Manifest:
        facts = dict(
            model="tiny", target="cpu", dtype="fp16", vocab=10, context=8, workers=2, tile_rows=8, step_tokens=(1, 4),
            launch_version=1, kv_bytes=64, exchange_bytes=64, stages=("embed", "sample"), eos_ids=(1, 2), bos_id=0,
            sections=({"stream": Section(0, 4096), "embed": Section(4096, 100_003 - 4096)},),
            chat_template="{{ messages }} ✓", shapes={"hidden": 16}, toolchain={"compiler": "none"}, cpu_features=("avx2",),
        )  # fmt: skip
        return Manifest(**{**facts, **changes})

    return make


@pytest.fixture
def write(tmp_path, manifest) -> Callable[..., Path]:
    """``write(name, **manifest fields)``: an artifact file."""

    def make(name: str = "model.kog", **changes: Any) -> Path:
        path = tmp_path / name
        with ArtifactWriter(path, 1 << 20) as writer:
            writer.add("kernel.cpp", "int main() {} // ✓\n")
            writer.add("kernel.so", bytes(range(256)) * 40)
            writer.add("program.json", "{}")
            writer.add("ir.json", "{}")
            with writer.region("weights/rank-0.bin", len(WEIGHTS)) as out:
                out[:] = WEIGHTS
            writer.add("tokenizer.json", "{}")
            writer.seal(manifest(**changes))
        return path

    return make
