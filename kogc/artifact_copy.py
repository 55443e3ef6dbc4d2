"""Writes an open artifact's members into another file, large ones from mapping to mapping."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kogc.artifact import MANIFEST, Artifact
from kogc.artifact_hashes import CHUNK
from kogc.artifact_writer import ArtifactWriter


def copy_members(artifact: Artifact, writer: ArtifactWriter, tell: Callable[[float, float], None]) -> None:
    """Add every member of ``artifact`` but its manifest to ``writer``. ``tell`` is told bytes copied and bytes in all.

    Raises OutputFailure.
    """
    members = {name: size for name, size in artifact.members.items() if name != MANIFEST}
    done, total = 0, sum(members.values())
    for name, size in members.items():
        if size <= CHUNK:
            writer.add(name, bytes(artifact.member(name)))
        else:
            data = np.frombuffer(artifact.member(name), np.uint8)
            with writer.region(name, size) as out:
                for start in range(0, size, CHUNK):
                    out[start : start + CHUNK] = data[start : start + CHUNK]
                    tell(done + start, total)
        done += size
        tell(done, total)
