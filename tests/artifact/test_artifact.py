"""What an open artifact offers, and what it refuses."""

import json
import subprocess
import sys
import time
import zipfile

import numpy as np
import pytest

from kogc import artifact_hashes
from kogc.artifact import load
from kogc.artifact_container import read_entries
from kogc.artifact_manifest import SCHEMA, Manifest
from kogc.errors import ArtifactError, BadInput


def test_everything_comes_back(write, manifest, weights):
    with load(write()) as artifact:
        assert artifact.source == "int main() {} // ✓\n"
        assert bytes(artifact.binary) == bytes(range(256)) * 40
        assert np.array_equal(artifact.weights(), weights)
        assert np.array_equal(artifact.section("embed"), weights[4096:])
        assert not artifact.weights().flags.writeable and artifact.weights().ctypes.data % 4096 == 0
        found = artifact.manifest
        assert found.members.keys() == artifact.members.keys() - {"manifest.json"}
        assert Manifest(**{**vars(found), "members": {}}) == manifest()
        assert "tiny for cpu" in repr(artifact)


def test_another_kernel_in_the_place_of_its_own(write, weights):
    artifact = load(write())
    other = artifact.with_kernel("int other;\n", b"\x7fELF", cpu_features=("sse2",))
    assert other.source == "int other;\n" and bytes(other.binary) == b"\x7fELF" and other.members["kernel.so"] == 4
    assert other.manifest.cpu_features == ("sse2",) and other.weights().ctypes.data == artifact.weights().ctypes.data
    assert artifact.source == "int main() {} // ✓\n" and artifact.manifest.cpu_features == ("avx2",)
    other.close()
    assert np.array_equal(artifact.weights(), weights)


def test_unknown_things_are_named(write):
    artifact = load(write())
    for call, message in (
        (lambda: artifact.member("nothing"), "section nothing is missing"),
        (lambda: artifact.section("plan"), "part plan of rank 0"),
        (lambda: artifact.weights(1), "no weights for rank 1"),
        (lambda: artifact.program, "section program.json cannot be read"),
        (lambda: artifact.ir, "section ir.json cannot be read"),
        (lambda: artifact.tokenizer, "section tokenizer.json cannot be read"),
    ):
        with pytest.raises(ArtifactError, match=message):
            call()


def test_a_newer_schema(write):
    with pytest.raises(ArtifactError, match=rf"schema {SCHEMA + 1}, this kogc reads up to {SCHEMA}; upgrade"):
        load(write(schema=SCHEMA + 1))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "1"}', '{"schema": 1}', '{"schema": 1, "stages": 3}'])
def test_a_manifest_that_is_none(text):
    with pytest.raises(ArtifactError, match="manifest.json"):
        Manifest.from_json(text)


def test_unknown_fields_of_the_same_schema_are_an_error(manifest):
    values = json.loads(manifest().to_json()) | {"surprise": 1}
    with pytest.raises(ArtifactError, match="surprise"):
        Manifest.from_json(json.dumps(values))


def test_sections_outside_the_weights(write):
    from kogc.artifact_manifest import Section

    artifact = load(write(sections=({"stream": Section(0, 1 << 40)},)))
    with pytest.raises(ArtifactError, match="puts part stream of rank 0 outside"):
        artifact.section("stream")


def test_large_members_are_checked_once(write, monkeypatch):
    monkeypatch.setattr(artifact_hashes, "CHUNK", 1 << 14)
    monkeypatch.setattr("kogc.artifact.CHUNK", 1 << 14)
    path = write()
    damage(path)
    artifact = load(path)  # loading does not read the weights
    checks = []
    original = artifact_hashes.check
    monkeypatch.setattr("kogc.artifact.check", lambda *arguments: (checks.append(arguments[0]), original(*arguments)))
    with pytest.raises(ArtifactError, match=r"section weights/rank-0.bin is damaged somewhere in its bytes 49152 to 65536"):
        artifact.verify_hashes()
    with pytest.raises(ArtifactError):
        load(path).verify_hashes()
    damage(path)  # back again
    load(path).verify_hashes()
    checks.clear()
    load(path).verify_hashes()
    assert "weights/rank-0.bin" not in checks
    load(path).verify_hashes(again=True)
    assert "weights/rank-0.bin" in checks


def test_a_changed_file_is_checked_again(write, monkeypatch):
    monkeypatch.setattr(artifact_hashes, "CHUNK", 1 << 14)
    monkeypatch.setattr("kogc.artifact.CHUNK", 1 << 14)
    path = write()
    load(path).verify_hashes()
    time.sleep(0.01)
    damage(path)
    with pytest.raises(ArtifactError, match="weights"):
        load(path).verify_hashes()


def test_a_cache_that_cannot_be_written_only_costs_time(write, monkeypatch):
    path = write()
    monkeypatch.setenv("KOGC_CACHE_DIR", "/proc/nowhere")
    load(path).verify_hashes()


def test_replacing_the_file_does_not_disturb_an_open_one(write, weights):
    artifact = load(write())
    write(model="other")
    assert artifact.manifest.model == "tiny" and np.array_equal(artifact.weights(), weights)


def test_loading_imports_neither_torch_nor_the_engine(write):
    script = f"""
import sys
from kogc.artifact import load
load({str(write())!r})
print([name for name in ("torch", "kogc.runtime.engine") if name in sys.modules])
"""
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"


def damage(path):
    """Flip one bit of the weights in place."""
    entry = next(e for e in read_entries(memoryview(path.read_bytes())) if e.name.startswith("weights"))
    with open(path, "r+b") as file:
        file.seek(entry.data + 50_000)
        byte = file.read(1)[0]
        file.seek(entry.data + 50_000)
        file.write(bytes([byte ^ 1]))


def test_a_closed_artifact_says_so(write):
    artifact = load(write())
    artifact.close()
    for use in (lambda: artifact.source, artifact.verify_hashes, artifact.engine):
        with pytest.raises(BadInput, match="is closed; open it again"):
            use()


def test_another_zip_file_is_not_called_damaged(tmp_path):
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        archive.writestr("model/data.pkl", bytes(5000))
    with pytest.raises(ArtifactError, match="this is not a kogc artifact"):
        load(tmp_path / "model.pt")
