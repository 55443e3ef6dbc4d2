"""What a kernel says about itself, held against what the manifest says about it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import TYPE_CHECKING

from kogc.codegen.launch import LAUNCH_VERSION
from kogc.errors import ArtifactError

if TYPE_CHECKING:
    from kogc.artifact import Artifact


class Fact(IntEnum):
    """Questions every kernel answers, by ``kogc_query`` of a shared library or ``kogc_facts`` of a GPU's binary. Workers are
    those of all ranks, bytes those of one."""

    LAUNCH_VERSION = 0
    WORKERS = 1
    TILE_ROWS = 2
    MAX_COLUMNS = 3
    VOCAB = 4
    CAPACITY = 5
    EXCHANGE_BYTES = 6
    KV_BYTES = 7
    PROBE_FLOATS = 8
    PLAN_WORDS = 9


class GpuFact(IntEnum):
    """What a GPU's binary says besides: the size of a block, and the dynamic shared memory it is launched with."""

    THREADS = 10
    SHARED_BYTES = 11


def check_facts(artifact: Artifact, facts: Mapping[int, int]) -> None:
    """Raises ArtifactError when the kernel of ``artifact`` speaks another launch version or contradicts its manifest."""
    if facts[Fact.LAUNCH_VERSION] != LAUNCH_VERSION:
        raise ArtifactError(
            f"{artifact.path}: the kernel speaks launch version {facts[Fact.LAUNCH_VERSION]}, this kogc {LAUNCH_VERSION}; "
            "compile the model again"
        )
    manifest = artifact.manifest
    expected = {
        Fact.WORKERS: manifest.ranks * manifest.workers,
        Fact.TILE_ROWS: manifest.tile_rows,
        Fact.VOCAB: manifest.vocab,
        Fact.CAPACITY: manifest.context,
        Fact.EXCHANGE_BYTES: manifest.exchange_bytes,
        Fact.KV_BYTES: manifest.kv_bytes,
    }
    for fact, value in expected.items():
        if facts[fact] != value:
            raise ArtifactError(
                f"{artifact.path}: its binary and manifest.json do not belong together ({fact.name.lower()}: {facts[fact]} and {value})"
            )
