"""Measuring a GPU's read ceiling on a GPU made of Python: what it reads, how often, and that it leaves nothing behind."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from fake_driver import FakeDriver, error

from kogc.errors import BadInput, EnvironmentFailure
from kogc.runtime import cuda_ceiling, cuda_driver
from kogc.runtime.cuda_ceiling import Reader, read_ceiling
from kogc.runtime.cuda_driver import Driver
from kogc.targets.h200 import toolchain


@pytest.fixture
def fake(monkeypatch, tmp_path):
    monkeypatch.setenv("KOGC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("KOGC_GPU", raising=False)
    cubin = tmp_path / "ceiling.cubin"
    cubin.write_bytes(b"\x7fELF")
    monkeypatch.setattr(toolchain, "build", lambda source, defines: cubin)
    fake = FakeDriver((), lambda launch, fake: None)
    monkeypatch.setattr(cuda_driver, "load_driver", lambda: Driver(fake))
    yield fake
    assert not (fake.contexts or fake.gpu_memory or fake.host_memory or fake.alive)


def arguments(launch: tuple) -> tuple[int, int, int]:
    """(address, bytes, repeats) of a launch."""
    pointers = (ctypes.c_void_p * 3).from_address(launch[9])
    return tuple(kind.from_address(at).value for kind, at in zip((ctypes.c_uint64, ctypes.c_int64, ctypes.c_int32), pointers))


def test_every_multiprocessor_reads_the_bytes_often_enough(fake, monkeypatch):
    monkeypatch.setattr(cuda_ceiling, "ROUND_BYTES", 1000)
    data = np.arange(333, dtype=np.uint16).view(np.uint8)[:333]
    launches = []
    fake._cuLaunchKernel = lambda *call: launches.append((call, arguments(call), fake.read(arguments(call)[0], 333)))
    with Reader(data) as reader:
        assert reader.rounds(3) == [320 * 4 / 1e-3] * 3
    assert len(launches) == 4
    for call, (_, nbytes, repeats), found in launches:
        assert call[1:8] == (132, 1, 1, 32, 1, 1, cuda_ceiling.CHUNK_BYTES * cuda_ceiling.SLOTS)
        assert (nbytes, repeats) == (320, 4) and found == data.tobytes()


def test_large_data_is_cut_and_tiny_data_bounded(fake, monkeypatch):
    monkeypatch.setattr(cuda_ceiling, "MOST_BYTES", 64)
    assert read_ceiling(np.zeros(1000, np.uint8), 128) == 64 * cuda_ceiling.MOST_REPEATS / 1e-3
    with pytest.raises(BadInput, match="15 bytes are too few"):
        Reader(np.zeros(15, np.uint8))


def test_no_room_is_said_and_nothing_stays(fake):
    fake.failures["cuMemAlloc"] = error("OUT_OF_MEMORY")
    with pytest.raises(EnvironmentFailure, match="no GPU memory for the bytes to measure reading with"):
        Reader(np.zeros(64, np.uint8))


def test_the_kernel_builds_without_spills():
    source = (cuda_ceiling.Path(toolchain.__file__).parent / "ceiling.cu").read_text()
    report = toolchain.resource_report(toolchain.build(source, ("CHUNK_BYTES=16384", "SLOTS=8")))
    assert not (report.spill_stores or report.stack)
