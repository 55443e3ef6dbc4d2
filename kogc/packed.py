"""An artifact's own weights, read back from its pack: rounded as the kernel sees them."""

from __future__ import annotations

from kogc.artifact import Artifact
from kogc.codegen.pack_index import pack_index
from kogc.codegen.pack_read import PackedWeights
from kogc.codegen.render import laid_out
from kogc.errors import ArtifactError
from kogc.ir.passes.schedule import schedule
from kogc.targets import load_target


def packed_weights(artifact: Artifact, rank: int = 0) -> PackedWeights:
    """A weight source over the artifact's streams, embedding tables and constants.

    Raises ArtifactError for an artifact without weights, and for one whose schedule this kogc would make differently:
    then nothing here knows which worker holds which row.
    """
    program, manifest = artifact.program, artifact.manifest
    target = load_target(manifest.target)
    made = schedule(program, manifest.workers, manifest.tile_rows)
    index = pack_index(program, made, target.layout)
    _, _, tables = laid_out(program, made, target, index)
    if bytes(artifact.section("plan", rank)) != tables.data:
        raise ArtifactError(
            f"{artifact.path} was compiled by kogc {manifest.kogc or 'of another version'}, which schedules differently; "
            "verify it against its MODEL, or compile it again"
        )
    return PackedWeights(artifact.weights(rank), index, program, made, target.layout)
