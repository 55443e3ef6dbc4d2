"""An artifact around a hand-written kernel that obeys the launch ABI, and the tools to make variants of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kogc.artifact import Artifact, load
from kogc.artifact_manifest import Manifest, Section
from kogc.artifact_writer import ArtifactWriter
from kogc.codegen.launch import LAUNCH_FIELDS, LAUNCH_VERSION, STATE_FIELDS, c_struct
from kogc.targets.cpu import toolchain

VOCAB, CONTEXT, WORKERS, EOS = 64, 48, 3, 63


def fake_source() -> str:
    structs = "\n".join((c_struct("kogc_state", STATE_FIELDS), c_struct("kogc_launch", LAUNCH_FIELDS), f"constexpr int LAUNCH_VERSION = {LAUNCH_VERSION};"))
    body = (Path(__file__).parent / "fake_kernel.cpp").read_text()
    return body.replace("/*STRUCTS*/", structs)


@pytest.fixture(scope="session")
def manifest() -> Callable[..., Manifest]:
    def make(**changes: Any) -> Manifest:
        facts = dict(
            model="fake", target="cpu", dtype="fp32", vocab=VOCAB, context=CONTEXT, workers=WORKERS, tile_rows=8,
            step_tokens=(1, 4), launch_version=LAUNCH_VERSION, kv_bytes=4 * CONTEXT, exchange_bytes=64,
            stages=("embed", "layers_attn", "sample"), eos_ids=(EOS,),
            sections=({name: Section(64 * i, 64) for i, name in enumerate(("stream", "embed", "consts", "plan"))},),
            toolchain=toolchain.toolchain_facts(), cpu_features=toolchain.required_features(),
        )  # fmt: skip
        return Manifest(**{**facts, **changes})

    return make


@pytest.fixture(scope="session")
def make_artifact(manifest, tmp_path_factory) -> Callable[..., Artifact]:
    """``make_artifact(source=…, tokenizer=…, **manifest fields)``: the fake artifact, written and loaded."""

    def make(source: str | None = None, binary: bytes | None = None, tokenizer: str | None = None, **changes: Any) -> Artifact:
        path = tmp_path_factory.mktemp("fake") / "fake.kog"
        source = source or fake_source()
        with ArtifactWriter(path, 1 << 16) as writer:
            writer.add("kernel.cpp", source)
            writer.add("kernel.so", binary or toolchain.build(source).read_bytes())
            if tokenizer:
                writer.add("tokenizer.json", tokenizer)
            with writer.region("weights/rank-0.bin", 256) as out:
                out[:] = np.arange(256, dtype=np.uint8)
            writer.seal(manifest(**changes))
        return load(path)

    return make


@pytest.fixture(scope="session")
def fake(make_artifact) -> Artifact:
    """Without tokenizer: ids in, ids out."""
    return make_artifact()


@pytest.fixture
def engine(fake):
    with fake.engine(stall_timeout=1.0) as engine:
        yield engine


def follow(ids: list[int], count: int, context: int = CONTEXT) -> list[int]:
    """What the fake kernel generates: the sum of everything so far, modulo the vocabulary."""
    made: list[int] = []
    while len(made) < count:
        made.append((sum(ids) + sum(made)) % VOCAB)
        if made[-1] == EOS or len(ids) + len(made) > context:
            break
    return made


@pytest.fixture(scope="session")
def expected() -> Callable[..., list[int]]:
    return follow
