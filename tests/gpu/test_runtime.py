"""The runtime on a real GPU, with a hand-written kernel: whatever fails here is not the compiler's fault."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kogc.artifact import load
from kogc.artifact_manifest import Manifest, Section
from kogc.artifact_writer import ArtifactWriter
from kogc.codegen.launch import LAUNCH_FIELDS, LAUNCH_VERSION, STATE_FIELDS, c_struct
from kogc.errors import EnvironmentFailure, KernelStalled
from kogc.targets.h200 import toolchain

pytestmark = pytest.mark.gpu

VOCAB, CONTEXT, WORKERS, EOS = 64, 48, 16, 63
STALL, SLOW, STUCK, CRASH = range(50, 54)


def source() -> str:
    parts = (c_struct("kogc_state", STATE_FIELDS), c_struct("kogc_launch", LAUNCH_FIELDS), f"constexpr int LAUNCH_VERSION = {LAUNCH_VERSION};")
    return (Path(__file__).parent / "sum_kernel.cu").read_text().replace("/*STRUCTS*/", "\n".join(parts))


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sum") / "sum.kog"
    manifest = Manifest(
        model="sum", target="h200", dtype="fp32", vocab=VOCAB, context=CONTEXT, workers=WORKERS, tile_rows=8, step_tokens=(1,),
        launch_version=LAUNCH_VERSION, kv_bytes=4 * CONTEXT, exchange_bytes=256, stages=("embed", "layers_attn", "sample"), eos_ids=(EOS,),
        sections=({name: Section(64 * i, 64) for i, name in enumerate(("stream", "embed", "consts", "plan"))},),
        toolchain=toolchain.toolchain_facts(),
    )  # fmt: skip
    with ArtifactWriter(path, 1 << 20) as writer:
        writer.add("kernel.cu", source())
        writer.add("kernel.cubin", toolchain.build(source()).read_bytes())
        with writer.region("weights/rank-0.bin", 256) as out:
            out[:] = np.arange(256, dtype=np.uint8)
        writer.seal(manifest)
    return path


@pytest.fixture
def engine(path):
    with load(path).engine() as engine:
        yield engine


def follow(ids: list[int], count: int) -> list[int]:
    made: list[int] = []
    while len(made) < count:
        made.append((sum(ids) + sum(made)) % VOCAB)
        if made[-1] == EOS or len(ids) + len(made) > CONTEXT:
            break
    return made


def ids(generation) -> list[int]:
    return [token.id for token in generation]


def test_tokens_and_times(engine):
    for _ in range(20):
        began = time.monotonic()
        generation = engine.generate([3, 4], max_tokens=8)
        assert ids(generation) == follow([3, 4], 8)
        assert 0 < generation.stats.ttft_s < time.monotonic() - began and generation.stats.decode_tok_s > 0


def test_slow_tokens_arrive_one_by_one_with_right_times(engine):
    began, seen = time.monotonic(), []
    generation = engine.generate([SLOW], max_tokens=10)
    for _ in generation:
        seen.append(time.monotonic() - began)
    assert all(0.015 < later - earlier < 0.03 for earlier, later in zip(seen, seen[1:], strict=False))
    assert abs(generation.stats.ttft_s - seen[0]) < 0.003
    assert 40 < generation.stats.decode_tok_s < 60


def test_logits(engine):
    assert engine.logits([1, 2, 3, 40, 41]).argmax(1).tolist() == [1, 3, 6, 46, 23]


@pytest.mark.parametrize("after", [0, 0.001, 0.1])
def test_cancel(engine, after):
    generation = engine.generate([STUCK], stall_timeout=30)
    time.sleep(after)
    began = time.monotonic()
    generation.close()
    assert time.monotonic() - began < 0.5 and generation.finish_reason == "cancelled"
    assert ids(engine.generate([3], max_tokens=3)) == follow([3], 3)


def test_stalls_end_in_time(engine):
    with pytest.raises(KernelStalled, match="layers_attn"):
        list(engine.generate([STALL]))
    began = time.monotonic()
    with pytest.raises(KernelStalled):
        list(engine.generate([STUCK], stall_timeout=0.5))
    assert 0.5 < time.monotonic() - began < 2
    assert ids(engine.generate([3], max_tokens=3)) == follow([3], 3)


def test_two_engines_take_turns(engine, path):
    with load(path).engine() as other:
        first = engine.generate([SLOW], max_tokens=10)
        assert ids(other.generate([9], max_tokens=5)) == follow([9], 5)
        assert ids(first) == follow([SLOW], 10)


SCRIPT = """
import sys
from kogc.artifact import load
engine = load(sys.argv[1]).engine()
generation = engine.generate([int(sys.argv[2])], max_tokens=20, stall_timeout=60)
print("running", flush=True)
print([token.id for token in generation], flush=True)
"""


def process(path, kind: int) -> subprocess.Popen:
    child = subprocess.Popen([sys.executable, "-P", "-c", SCRIPT, str(path), str(kind)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "running\n", child.stderr.read()
    return child


def test_another_process_waits_for_its_turn(engine, path):
    child = process(path, SLOW)
    began = time.monotonic()
    assert ids(engine.generate([9], max_tokens=5)) == follow([9], 5)
    assert time.monotonic() - began > 0.1
    assert child.communicate(timeout=30)[0] == f"{follow([SLOW], 20)}\n"


def test_a_killed_process_leaves_a_usable_gpu(engine, path):
    child = process(path, STUCK)
    child.kill()
    child.wait()
    began = time.monotonic()
    assert ids(engine.generate([3], max_tokens=3)) == follow([3], 3)
    assert time.monotonic() - began < 2


def test_ctrl_c_cancels(engine, path):
    child = process(path, STUCK)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=10)
    assert "KeyboardInterrupt" in errors and child.returncode != 0
    assert ids(engine.generate([3], max_tokens=3)) == follow([3], 3)


def test_a_crash_is_named(path):
    """In a process of its own: its context is lost."""
    child = process(path, CRASH)
    _, errors = child.communicate(timeout=60)
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in errors or "CUDA_ERROR_LAUNCH_FAILED" in errors, errors


def test_too_much_memory_is_refused_by_name(engine):
    with pytest.raises(EnvironmentFailure, match=r"no GPU memory for a moon: \d+ bytes are needed, \d+ of the GPU's \d+ bytes are free"):
        engine._device.alloc(1 << 42, "a moon")
    assert ids(engine.generate([3], max_tokens=3)) == follow([3], 3)


HOG = """
from kogc.runtime import cuda_driver
from kogc.runtime.cuda_driver import Context, CudaError
driver = cuda_driver.load_driver()
with Context(driver, cuda_driver.chosen_gpu(driver).ordinal):
    size = driver.call("cuMemGetInfo")[0]
    while size > 32 << 20:
        try:
            driver.call("cuMemAlloc", size)
        except CudaError:
            size //= 2
print("full", flush=True)
input()
"""


def test_another_process_that_fills_the_memory(engine, path):
    """Not beside other tests: they would find no memory either."""
    child = subprocess.Popen([sys.executable, "-P", "-c", HOG], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "full\n"
        began = time.monotonic()
        with pytest.raises(EnvironmentFailure, match="no GPU memory for the caches: 1073741824 bytes are needed"):
            engine._device.alloc(1 << 30, "the caches")
        assert ids(engine.generate([3], max_tokens=3)) == follow([3], 3)
        assert time.monotonic() - began < 2
        late = subprocess.run([sys.executable, "-P", "-c", SCRIPT, str(path), "3"], capture_output=True, text=True, timeout=60)
        assert late.returncode != 0 and ("cannot be used" in late.stderr or "no GPU memory for" in late.stderr), late.stderr
    finally:
        child.kill()
        child.communicate()
    engine._device.alloc(1 << 30, "the caches").free()
    assert ids(engine.generate([3], max_tokens=3)) == follow([3], 3)


def test_beside_torch(engine):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.randn(512, 512, device="cuda")
        assert ids(engine.generate([3, 4], max_tokens=8)) == follow([3, 4], 8)
        assert torch.cuda.current_stream() == side
        y = x @ x
    torch.cuda.synchronize()
    assert torch.allclose(y, x @ x) and torch.cuda.current_device() == 0
    engine.close()
    assert float(torch.ones(3, device="cuda").sum()) == 3
