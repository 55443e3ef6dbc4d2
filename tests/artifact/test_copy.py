"""A copy holds the same members, large and small."""

import numpy as np
import pytest

from kogc import artifact_copy
from kogc.artifact import load
from kogc.artifact_copy import copy_members
from kogc.artifact_writer import ArtifactWriter


@pytest.mark.parametrize("chunk", [1 << 24, 30_000], ids=["whole", "by chunks"])
def test_a_copy_is_the_same_but_for_the_kernel(write, weights, tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(artifact_copy, "CHUNK", chunk)
    artifact, told = load(write()), []
    other = artifact.with_kernel("int other;", b"ELF", gate={"passed": True})
    with ArtifactWriter(tmp_path / "copy.kog", sum(other.members.values())) as writer:
        copy_members(other, writer, lambda done, total: told.append((done, total)))
        writer.seal(other.manifest)
    copy = load(tmp_path / "copy.kog")
    copy.verify_hashes(again=True)
    assert list(copy.members) == list(artifact.members) and copy.manifest.gate == {"passed": True}
    assert copy.source == "int other;" and bytes(copy.binary) == b"ELF" and np.array_equal(copy.weights(), weights)
    assert told == sorted(told) and told[-1][0] == told[-1][1]


def test_a_file_is_replaced_by_a_copy_of_itself(write, weights):
    artifact = load(write())
    other = artifact.with_kernel("int other;", b"ELF")
    with ArtifactWriter(artifact.path, sum(other.members.values())) as writer:
        copy_members(other, writer, lambda done, total: None)
        writer.seal(other.manifest)
    assert load(artifact.path).source == "int other;" and artifact.source == "int main() {} // ✓\n"
    assert np.array_equal(load(artifact.path).weights(), artifact.weights())
