"""The file as such: an ordinary zip with aligned members, in which no flipped byte goes unnoticed."""

import subprocess
import sys
import zipfile

import numpy as np
import pytest

from kogc.artifact import load
from kogc.artifact_container import ALIGN, TAIL_BYTES, read_entries
from kogc.errors import ArtifactError

MEMBERS = ["manifest.json", "kernel.cpp", "kernel.so", "program.json", "ir.json", "weights/rank-0.bin", "tokenizer.json"]


def test_members_are_aligned_and_the_manifest_comes_first(write):
    data = write().read_bytes()
    entries = read_entries(memoryview(data))
    assert [entry.name for entry in entries] == MEMBERS
    assert all(entry.data % ALIGN == 0 for entry in entries)


def test_zip_tools_can_read_it(write):
    path = write()
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == MEMBERS
        assert archive.read("kernel.cpp").decode() == "int main() {} // ✓\n"
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
    subprocess.run([sys.executable, "-m", "zipfile", "-t", path], check=True, capture_output=True)


def test_unzip_can_read_it(write):
    try:
        done = subprocess.run(["unzip", "-t", write()], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no unzip here")
    assert done.returncode == 0 and "No errors" in done.stdout


def test_equal_inputs_give_equal_files(write):
    assert write("one.kog").read_bytes() == write("two.kog").read_bytes()


def opened_whole(path):
    artifact = load(path)
    artifact.verify_hashes()


@pytest.mark.parametrize("name", MEMBERS)
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_a_flipped_byte_in_a_member(write, name, where):
    path = write()
    data = bytearray(path.read_bytes())
    entry = next(entry for entry in read_entries(memoryview(bytes(data))) if entry.name == name)
    offset = {"first": entry.data, "middle": entry.data + entry.size // 2, "last": entry.end - 1}[where]
    data[offset] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match=name) as caught:
        opened_whole(path)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_a_flipped_byte_in_the_structure(write):
    """Every byte that is not member data, in steps: headers, padding, directory, end records."""
    path = write()
    whole = path.read_bytes()
    entries = read_entries(memoryview(whole))
    headers = [offset for entry in entries for offset in [*range(entry.header, entry.header + 90), entry.data - 1]]
    for offset in [*headers, *range(entries[-1].end, len(whole))]:
        data = bytearray(whole)
        data[offset] ^= 4
        with pytest.raises(ArtifactError):
            read_entries(memoryview(data))


def test_the_section_is_named_for_structure_too(write):
    path = write()
    data = bytearray(path.read_bytes())
    data[-TAIL_BYTES - 20] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match="zip directory"):
        load(path)


@pytest.mark.parametrize("cut", [1, 21, TAIL_BYTES, 500, 5000, 100_000])
def test_truncated(write, cut):
    path = write()
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(ArtifactError, match="truncated"):
        load(path)


def test_bytes_appended(write):
    path = write()
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(ArtifactError, match="truncated|damaged"):
        load(path)


def test_not_an_artifact(tmp_path, write):
    path = tmp_path / "x.kog"
    with pytest.raises(ArtifactError, match="does not exist"):
        load(path)
    path.write_bytes(b"")
    with pytest.raises(ArtifactError, match="empty"):
        load(path)
    path.write_bytes(b"GGUF" + bytes(5000))
    with pytest.raises(ArtifactError, match="not a kogc artifact"):
        load(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("hello", "world")
    with pytest.raises(ArtifactError, match="not a kogc artifact|damaged"):
        load(path)
    with pytest.raises(ArtifactError, match="folder"):
        load(tmp_path)


def test_more_than_four_gigabytes_are_placed_right():
    from kogc.artifact_container import directory, local_header, place

    first = place("manifest.json", 10, 1, 0)
    large = place("weights/rank-0.bin", 5 << 30, 2, first.end)
    last = place("tokenizer.json", 3, 3, large.end)
    assert last.data > 5 << 30 and last.data % ALIGN == 0
    assert len(local_header(last)) == last.data - last.header
    assert np.frombuffer(directory([first, large, last]), np.uint8).size > TAIL_BYTES
