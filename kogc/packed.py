"""An artifact's own weights, read back from its packs: rounded as the kernel sees them."""

from __future__ import annotations

from kogc.artifact import Artifact
from kogc.codegen.pack_read import PackedWeights
from kogc.codegen.rank_pack import RankedWeights, rank_indices, rank_schedules, whole_index
from kogc.codegen.render import laid_out
from kogc.errors import ArtifactError
from kogc.ir.passes.schedule import schedule
from kogc.ir.weights import WeightSource
from kogc.targets import load_target


def packed_weights(artifact: Artifact) -> WeightSource:
    """A weight source over the artifact's streams, embedding tables and constants, of all ranks together.

    Raises ArtifactError for an artifact without weights, and for one whose schedule this kogc would make differently:
    then nothing here knows which worker holds which row.
    """
    program, manifest = artifact.program, artifact.manifest
    layout = load_target(manifest.target).layout
    made = schedule(program, manifest.ranks * manifest.workers, manifest.tile_rows)
    _, _, tables = laid_out(program, made, load_target(manifest.target), whole_index(program, made, layout))
    if any(bytes(artifact.section("plan", rank)) != tables.data for rank in range(manifest.ranks)):
        raise ArtifactError(
            f"{artifact.path} was compiled by kogc {manifest.kogc or 'of another version'}, which schedules differently; "
            "verify it against its MODEL, or compile it again"
        )
    shares = zip(rank_indices(program, made, layout), rank_schedules(program, made), strict=True)
    ranks = [PackedWeights(artifact.weights(r), index, program, own, layout) for r, (index, own) in enumerate(shares)]
    return ranks[0] if len(ranks) == 1 else RankedWeights(ranks)
