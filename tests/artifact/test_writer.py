"""Writing: all or nothing, and one clear line when the disk does not play along."""

import errno
import os
import subprocess

import numpy as np
import pytest

from kogc import artifact_writer
from kogc.artifact import load
from kogc.artifact_writer import ArtifactWriter
from kogc.errors import OutputFailure


def files(folder):
    return sorted(entry.name for entry in folder.iterdir() if entry.name != "cache")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
def test_a_failure_leaves_nothing_and_keeps_the_old_file(write, tmp_path, error):
    path = write()
    before = path.read_bytes()
    with pytest.raises(error), ArtifactWriter(path, 100) as writer:
        writer.add("kernel.cpp", "new")
        with writer.region("weights/rank-0.bin", 5000) as out:
            out[:10] = 1
            raise error
    assert files(tmp_path) == ["model.kog"] and path.read_bytes() == before


def test_an_unsealed_file_is_not_kept(tmp_path):
    with ArtifactWriter(tmp_path / "x.kog", 100) as writer:
        writer.add("kernel.cpp", "text")
    assert files(tmp_path) == []


def test_the_gate_runs_on_a_preview_and_is_recorded(tmp_path, manifest):
    path = tmp_path / "x.kog"
    with ArtifactWriter(path, 100) as writer:
        writer.add("kernel.cpp", "text")
        writer.seal(manifest())
        with writer.preview() as artifact:
            assert artifact.source == "text" and artifact.manifest.gate is None
            artifact.verify_hashes()
        assert not path.exists()
        writer.amend(gate={"passed": True})
    assert load(path).manifest.gate == {"passed": True} and files(tmp_path) == ["x.kog"]


def test_tables_come_back(tmp_path, manifest):
    tables = {"cos": np.linspace(0, 1, 12).reshape(3, 4), "sin": np.zeros((3, 4), np.float32)}
    with ArtifactWriter(tmp_path / "x.kog", 1000) as writer:
        writer.add_tables(tables)
        writer.seal(manifest())
    found = load(tmp_path / "x.kog").tables
    assert found.keys() == tables.keys() and all(np.array_equal(found[key], tables[key]) for key in tables)
    assert found["cos"].dtype == np.float64


def test_pages_are_given_back_while_a_region_is_filled(tmp_path, manifest, monkeypatch):
    import time

    monkeypatch.setattr(artifact_writer, "_RELEASE_EVERY_S", 0.01)
    values = np.random.default_rng(1).integers(0, 256, 8 << 20, dtype=np.uint8)
    with ArtifactWriter(tmp_path / "x.kog", 8 << 20) as writer:
        with writer.region("weights/rank-0.bin", values.size) as out:
            for at in range(0, values.size, 1 << 20):
                out[at : at + (1 << 20)] = values[at : at + (1 << 20)]
                time.sleep(0.01)
        writer.seal(manifest(sections=()))
    artifact = load(tmp_path / "x.kog")
    artifact.verify_hashes(again=True)
    assert np.array_equal(artifact.weights(), values)


def test_a_manifest_that_outgrows_its_room(tmp_path, manifest):
    with pytest.raises(OutputFailure, match="shorten the chat template"), ArtifactWriter(tmp_path / "x.kog", 100) as writer:
        writer.seal(manifest(chat_template="x" * (1 << 20)))
    assert files(tmp_path) == []


def test_new_files_obey_the_umask(tmp_path, manifest):
    before = os.umask(0o027)
    try:
        with ArtifactWriter(tmp_path / "x.kog", 100) as writer:
            writer.seal(manifest())
    finally:
        os.umask(before)
    assert (tmp_path / "x.kog").stat().st_mode & 0o777 == 0o640


def test_a_missing_folder(tmp_path):
    path = tmp_path / "nowhere" / "x.kog"
    with pytest.raises(OutputFailure, match=r"the folder .*nowhere does not exist; make it") as caught, ArtifactWriter(path, 1):
        pass
    assert caught.value.exit_code == 1


def test_a_folder_as_target(tmp_path):
    with pytest.raises(OutputFailure, match="it is a folder"), ArtifactWriter(tmp_path, 1):
        pass


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_read_only_folder(tmp_path, monkeypatch, code):
    # Permissions do not stop root, who runs the tests in many a container: the system's answer is played instead.
    def refuse(path, *arguments):
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(artifact_writer.os, "open", refuse)
    with pytest.raises(OutputFailure, match="is read-only; choose another"), ArtifactWriter(tmp_path / "x.kog", 1):
        pass


def test_too_little_space_is_said_before_anything_is_written(tmp_path):
    message = rf"the folder {tmp_path} is full \(\d+ bytes needed, \d+ free\)"
    with pytest.raises(OutputFailure, match=message), ArtifactWriter(tmp_path / "x.kog", 1 << 60):
        pass
    assert files(tmp_path) == []


def test_a_disk_that_fills_up_while_writing(tmp_path, manifest, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OutputFailure, match="is full"), ArtifactWriter(tmp_path / "x.kog", 100) as writer:
        monkeypatch.setattr(artifact_writer.os, "write", full)
        writer.add("kernel.cpp", "text")
    monkeypatch.undo()
    monkeypatch.setattr(artifact_writer.os, "posix_fallocate", full)
    with pytest.raises(OutputFailure, match="is full"), ArtifactWriter(tmp_path / "x.kog", 100) as writer, writer.region("w", 50):
        pass
    assert files(tmp_path) == []


def test_a_really_full_disk(tmp_path, manifest):
    """On a file system of one megabyte, where that may be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting is not allowed here")
    try:
        with pytest.raises(OutputFailure, match="is full"), ArtifactWriter(disk / "x.kog", 100) as writer, writer.region("w", 4 << 20):
            pass
        with pytest.raises(OutputFailure, match="is full"), ArtifactWriter(disk / "x.kog", 100) as writer:
            writer.add("kernel.so", bytes(4 << 20))
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_as_target(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputFailure, match="it is a device or a pipe"), ArtifactWriter(tmp_path / "pipe", 1):
        pass
    assert (tmp_path / "pipe").is_fifo()


def test_a_link_stays_and_its_file_is_replaced(tmp_path, manifest):
    (tmp_path / "there").mkdir()
    (tmp_path / "link.kog").symlink_to(tmp_path / "there" / "x.kog")
    with ArtifactWriter(tmp_path / "link.kog", 100) as writer:
        writer.seal(manifest())
    assert (tmp_path / "link.kog").is_symlink() and load(tmp_path / "there" / "x.kog").manifest.model == "tiny"
    assert files(tmp_path / "there") == ["x.kog"]
