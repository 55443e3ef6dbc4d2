"""The h200 runtime on a GPU made of Python: what it asks of the driver, in which order, and what it says when that fails."""

from __future__ import annotations

import ctypes
import gc
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from fake_driver import FakeDriver, cancelled, error, summing_kernel

from kogc import SamplingParams
from kogc.artifact import load
from kogc.artifact_manifest import Manifest, Section
from kogc.artifact_writer import ArtifactWriter
from kogc.codegen.launch import LAUNCH_VERSION, State
from kogc.errors import ArtifactError, BadInput, EnvironmentFailure, KernelStalled, MachineMismatch, PlanRejected, WorkersMissing
from kogc.runtime import cuda_driver, cuda_memory, cuda_module
from kogc.runtime.cuda import CudaDevice, CudaRun
from kogc.runtime.cuda_driver import CudaError, Driver
from kogc.runtime.cuda_turn import Turn
from kogc.runtime.device import device_id
from kogc.runtime.kernel_thread import KernelThread
from kogc.speed import passed_gate
from kogc.targets.h200 import toolchain
from kogc.tune import tune
from kogc.tune_bench import Bench
from kogc.tune_search import Comparison

VOCAB, CONTEXT, WORKERS, EOS, EXCHANGE, THREADS, SHARED = 64, 48, 132, 63, 256, 384, 231000
STALL, MISSING, SLOW, STUCK, CRASH, SILENT = range(50, 56)
SECTION = 100_000
FACTS = (LAUNCH_VERSION, WORKERS, 8, 1, VOCAB, CONTEXT, EXCHANGE, 4 * CONTEXT, 4, 16, THREADS, SHARED)


def stall(launch, state, fake):
    state.abort_stage, state.abort_iteration, state.abort_worker, state.abort_peer = 1, 2, 7, -1
    state.abort_expected, state.abort_step, state.abort, state.finished = -1, 3, 1, 5


def missing(launch, state, fake):
    state.abort_stage, state.abort_worker, state.abort, state.finished = -1, 5, 1, 5


def stuck(launch, state, fake):
    while not cancelled(launch):
        time.sleep(1e-3)
    state.finished = 4


def slow(launch, state, fake):
    ring = (ctypes.c_int32 * launch.max_tokens).from_address(launch.ring)
    while state.produced < launch.max_tokens and not cancelled(launch):
        time.sleep(0.01)
        ring[state.produced] = state.produced
        state.produced += 1
    state.finished = 4 if cancelled(launch) else 2


def crash(launch, state, fake):
    return error("ILLEGAL_ADDRESS")


SPECIAL = {STALL: stall, MISSING: missing, SLOW: slow, STUCK: stuck, CRASH: crash, SILENT: lambda launch, state, fake: None}


@pytest.fixture(scope="module")
def make_artifact(tmp_path_factory):
    def make(binary: bytes = b"\x7fELF fake", source: str = "// no kernel\n", **changes):
        path = tmp_path_factory.mktemp("fake") / "fake.kog"
        facts = dict(
            model="fake", target="h200", dtype="fp32", vocab=VOCAB, context=CONTEXT, workers=WORKERS, tile_rows=8, step_tokens=(1,),
            launch_version=LAUNCH_VERSION, kv_bytes=4 * CONTEXT, exchange_bytes=EXCHANGE, stages=("embed", "layers_attn", "sample"),
            eos_ids=(EOS,), toolchain={"compiler": "NVRTC 13.5.37"},
            sections=({name: Section(SECTION * i, SECTION) for i, name in enumerate(("stream", "embed", "consts", "plan"))},),
        )  # fmt: skip
        with ArtifactWriter(path, 1 << 20) as writer:
            writer.add("kernel.cu", source)
            writer.add("kernel.cubin", binary)
            with writer.region("weights/rank-0.bin", 4 * SECTION) as out:
                out[:] = weights()
            writer.seal(Manifest(**{**facts, **changes}))
        return load(path)

    return make


def weights() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, 4 * SECTION, np.uint8)


@pytest.fixture(scope="module")
def artifact(make_artifact):
    return make_artifact()


@pytest.fixture
def fake(monkeypatch, tmp_path):
    monkeypatch.setenv("KOGC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("KOGC_GPU", raising=False)
    fake = FakeDriver(FACTS, summing_kernel(SPECIAL, VOCAB, EOS, CONTEXT))
    monkeypatch.setattr(cuda_driver, "load_driver", lambda: Driver(fake))
    yield fake
    assert fake.contexts == [], "a call left its context current"


def ids(generation):
    return [token.id for token in generation]


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name == "kogc-kernel"]


# ── generating ──


def test_tokens_times_and_launch(fake, artifact, expected):
    began = time.monotonic()
    with artifact.engine() as engine:
        generation = engine.generate([3, 4], max_tokens=8)
        assert ids(generation) == expected([3, 4], 8) and generation.finish_reason == "length"
        took = time.monotonic() - began
        # The kernel's clock is seven thousand seconds off.
        assert 0 < generation.stats.ttft_s < took and generation.stats.decode_tok_s > 0
    grid = next(arguments for name, arguments in fake.calls if name == "cuLaunchCooperativeKernel")
    assert grid[1:8] == (WORKERS, 1, 1, THREADS, 1, 1, SHARED)
    attribute, value = next(arguments[1:] for name, arguments in fake.calls if name == "cuFuncSetAttribute")
    assert attribute.name == "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES" and value == SHARED


def test_times_do_not_wait_for_the_hosts_thread(fake, artifact, monkeypatch):
    """The GPU's clock is read when the kernel starts; whatever the host does then happens beside the kernel."""
    begin = KernelThread.__init__
    monkeypatch.setattr(KernelThread, "__init__", lambda run, left: (time.sleep(0.1), begin(run, left))[1])
    with artifact.engine() as engine:
        generation = engine.generate([3, 4], max_tokens=8)
        list(generation)
    assert 0 < generation.stats.prompt_s < generation.stats.ttft_s < 0.1


def test_only_the_greedy_choice_is_there(fake, artifact, expected):
    with artifact.engine() as engine:
        assert ids(engine.generate([3, 4], sampling=SamplingParams(max_tokens=4))) == expected([3, 4], 4)
        for how in (SamplingParams(temperature=0.7), SamplingParams(logprobs=1), SamplingParams(presence_penalty=1)):
            with pytest.raises(BadInput, match="kernels for h200 choose the likeliest token only") as caught:
                engine.generate([3, 4], sampling=how)
            assert "\n" not in str(caught.value)


def test_runs_repeat_and_sessions_continue(fake, artifact, expected):
    with artifact.engine() as engine:
        assert [ids(engine.generate([1, 2, 3], max_tokens=6)) for _ in range(3)] == [expected([1, 2, 3], 6)] * 3
        with engine.session() as session:
            first = ids(engine.generate([1, 2], max_tokens=3, session=session))
            second = ids(engine.generate([9], max_tokens=3, session=session))
        assert second == expected([1, 2, *first, 9], 3)


def test_logits_stay_valid_after_the_engine(fake, artifact):
    with artifact.engine() as engine:
        logits = engine.logits([1, 2, 3, 40, 41])
    gc.collect()
    assert logits.argmax(1).tolist() == [1, 3, 6, 46, 23] and logits.sum() == 5
    del logits
    gc.collect()
    assert not fake.host_memory


def test_weights_arrive_as_they_are(fake, artifact, monkeypatch):
    monkeypatch.setattr(cuda_memory, "STAGING_BYTES", 30_000)
    told = []
    with artifact.engine(progress=lambda *step: told.append(step)) as engine:
        data = b"".join(fake.read(getattr(engine._pointers[0], name), SECTION) for name in ("stream", "embed", "consts", "plan"))
        assert data == weights().tobytes()
    assert told[0] == ("uploading weights", 30_000, 4 * SECTION) and told[-1] == ("uploading weights", 4 * SECTION, 4 * SECTION)
    assert len(told) == 16 and [done for _, done, _ in told] == sorted(done for _, done, _ in told)


def test_memory_starts_as_zeros(fake, artifact):
    with artifact.engine() as engine:
        assert fake.read(engine._kv[0].address, 4 * CONTEXT) == bytes(4 * CONTEXT)
        assert fake.read(engine._exchange[0].address, EXCHANGE) == bytes(EXCHANGE)
        block = engine._device.alloc(100, "something", host=True)
        assert not block.view(np.uint8).any()
        with pytest.raises(TypeError, match="no view"):
            engine._kv[0].view(np.uint8)


def test_exchange_and_control_are_zeroed_before_every_launch(fake, artifact):
    with artifact.engine() as engine:
        for _ in range(2):
            fake.calls.clear()
            ids(engine.generate([3], max_tokens=2))
            before = fake.calls[: fake.names().index("cuLaunchCooperativeKernel")]
            zeroed = {arguments[0]: arguments[2] for name, arguments in before if name == "cuMemsetD8Async"}
            (to, pinned, size, _), = (arguments for name, arguments in before if name == "cuMemcpyHtoDAsync")
            assert zeroed[engine._exchange[0].address] == EXCHANGE
            assert to == fake.launched.control and fake.read(pinned, size) == bytes(64) + struct.pack("ii", 3, EOS)
            assert (fake.launched.prompt, fake.launched.stop_ids) == (to + 64, to + 68)


# ── profiling ──


def clocks(launch, state, fake):
    """Every launch of a profile build writes the clocks of its workers."""
    into = (ctypes.c_int64 * (WORKERS * 2 * 2)).from_address(launch.probe)
    into[:] = range(WORKERS * 2 * 2)
    state.produced, state.finished = 0, 4


def test_a_profile_build_keeps_the_clocks_of_the_last_step(fake, make_artifact, monkeypatch, tmp_path):
    artifact = make_artifact(source="// clocks: KOGC_PROFILE\n")
    cubin = tmp_path / "profile.cubin"
    cubin.write_bytes(b"\x7fELF with clocks")
    builds = []
    monkeypatch.setattr(cuda_module.toolchain, "build", lambda source, defines: (builds.append(defines), cubin)[1])
    fake.facts = (*FACTS[:8], WORKERS * 2 * 4, *FACTS[9:])
    fake.kernel = lambda launch, fake: clocks(launch, State.from_address(launch.state), fake)
    with artifact.engine(profile=True) as engine:
        assert not engine.stamps().any()
        list(engine.generate([3], max_tokens=2))
        assert engine.stamps().tolist() == np.arange(WORKERS * 4).reshape(WORKERS, 2, 2).tolist()
    assert builds == [("KOGC_PROFILE",)]


def test_engines_without_clocks_say_so(fake, artifact):
    with artifact.engine() as engine, pytest.raises(BadInput, match=r"profile=True"):
        engine.stamps()
    with pytest.raises(BadInput, match="kernels for h200 keep no clocks"):
        artifact.engine(profile=True)
    with pytest.raises(BadInput, match="either probes or profiles"):
        artifact.engine(profile=True, probe=True)


# ── cancelling ──


def test_cancel_writes_one_word_past_the_kernel(fake, artifact, expected):
    with artifact.engine() as engine:
        generation = engine.generate([STUCK], max_tokens=5)
        fake.calls.clear()
        generation.close()
        assert generation.finish_reason == "cancelled" and not threads()
        names = fake.names()
        assert names.index("cuStreamWaitEvent") < names.index("cuMemcpyHtoDAsync")
        to, _, size, stream = next(arguments for name, arguments in fake.calls if name == "cuMemcpyHtoDAsync")
        assert (to, size) == (fake.launched.control, 4) and stream != engine._device._queue.stream
        assert ids(engine.generate([3], max_tokens=3)) == expected([3], 3)


def test_ctrl_c_while_the_kernel_starts_leaves_nothing_behind(fake, artifact, expected, monkeypatch):
    def interrupted(run):
        raise KeyboardInterrupt

    with artifact.engine() as engine:
        with monkeypatch.context() as patch:
            patch.setattr(CudaRun, "_see_start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.generate([STUCK])
        assert not threads() and not [thread for thread in threading.enumerate() if thread.name == "fake-gpu"]
        assert ids(engine.generate([3], max_tokens=3)) == expected([3], 3)


def test_a_long_prompt_gets_more_room(fake, make_artifact, expected):
    fake.facts = (*FACTS[:5], 40_000, EXCHANGE, 4 * 40_000, *FACTS[8:])
    fake.kernel = summing_kernel(SPECIAL, VOCAB, EOS, 40_000)
    with make_artifact(context=40_000, kv_bytes=4 * 40_000).engine() as engine:
        for length in (1, 20_000, 3, 39_000):
            prompt = [1] * length
            assert ids(engine.generate(prompt, max_tokens=2)) == expected(prompt, 2, 40_000)


def test_forgotten_generations_and_closed_engines_cancel(fake, artifact):
    engine = artifact.engine()
    engine.generate([STUCK])
    gc.collect()
    assert not threads()
    generation = engine.generate([STUCK])
    engine.close()
    assert not threads() and ids(generation) == [] and generation.finish_reason == "cancelled"


def test_a_generation_in_a_cycle_keeps_its_memory_until_the_kernel_has_left(fake, artifact):
    """The garbage collector takes memory away before anybody can cancel: the kernel must not notice."""
    with artifact.engine() as engine:
        generation = engine.generate([SLOW], max_tokens=20)
        next(generation)
        generation.itself = generation
        freed = []
        fake_free = fake._cuMemFreeHost
        fake._cuMemFreeHost = lambda address: (freed.append(bool(threads())), fake_free(address))
        del generation
        gc.collect()
        while threads():
            time.sleep(0.01)
        engine._device._memory.close()
    assert not any(freed)


# ── one at a time ──


def test_a_second_engine_waits_for_the_first(fake, artifact, expected):
    with artifact.engine() as one, artifact.engine() as other:
        first = one.generate([SLOW], max_tokens=10)
        assert ids(other.generate([9], max_tokens=5)) == expected([9], 5)
        assert one._device._queue.stream != other._device._queue.stream
        assert ids(first) == list(range(10))
        launches = [number for number, name in enumerate(fake.names()) if name == "cuLaunchCooperativeKernel"]
        ended = [number for number, (name, _) in enumerate(fake.calls) if name == "cuEventSynchronize"]
        assert len(launches) == 2 and any(launches[0] < number < launches[1] for number in ended)


def test_a_turn_excludes_others_and_ends(tmp_path, monkeypatch):
    monkeypatch.setenv("KOGC_CACHE_DIR", str(tmp_path))
    turn, order = Turn("abc"), []
    for _ in range(2):
        turn.take()

        def other():
            with Turn("abc"):
                order.append("second")

        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        with Turn("another GPU"):
            order.append("first")
        turn.end()
        turn.end()
        thread.join(5)
    assert order == ["first", "second"] * 2
    turn.close()
    turn.close()


def test_a_turn_outlives_its_file(tmp_path, monkeypatch):
    """The cache folder may be emptied at any time: all meet at the new file."""
    monkeypatch.setenv("KOGC_CACHE_DIR", str(tmp_path))
    one, other = Turn("abc"), Turn("abc")
    with one:
        pass
    shutil.rmtree(tmp_path / "locks")
    one.take()
    thread = threading.Thread(target=other.take)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    one.close()
    thread.join(5)
    assert not thread.is_alive()
    other.close()


WAITING = "from kogc.runtime.cuda_turn import Turn; print('asking', flush=True); turn = Turn('abc'); turn.take(); print('mine', flush=True); input()"


def waiting_process() -> subprocess.Popen:
    child = subprocess.Popen([sys.executable, "-P", "-c", WAITING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "asking\n"
    return child


def test_ctrl_c_ends_the_wait_for_a_turn(tmp_path, monkeypatch):
    monkeypatch.setenv("KOGC_CACHE_DIR", str(tmp_path))
    turn = Turn("abc")
    turn.take()
    child = waiting_process()
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    out, errors = child.communicate(timeout=10)
    assert out == "" and "KeyboardInterrupt" in errors
    turn.end()


def test_a_killed_process_ends_its_turn(tmp_path, monkeypatch):
    monkeypatch.setenv("KOGC_CACHE_DIR", str(tmp_path))
    child = waiting_process()
    assert child.stdout.readline() == "mine\n"
    child.kill()
    child.communicate(timeout=10)
    with Turn("abc"):
        pass


def test_a_failed_launch_ends_its_turn(fake, artifact, expected):
    with artifact.engine() as engine:
        fake.failures["cuLaunchCooperativeKernel"] = error("COOPERATIVE_LAUNCH_TOO_LARGE")
        with pytest.raises(MachineMismatch, match="no room for 132 blocks of 384 threads"):
            engine.generate([3])
        fake.failures.clear()
        assert ids(engine.generate([3], max_tokens=3)) == expected([3], 3)


# ── what can go wrong ──


def test_a_stall_names_the_stage(fake, artifact):
    with artifact.engine() as engine, pytest.raises(KernelStalled, match=r"stage layers_attn .*worker 7 waited for 2 s for another; ") as caught:
        list(engine.generate([STALL]))
    assert (caught.value.peer, caught.value.expected, caught.value.seen) == (None, None, None), "which word it was nobody can tell"


def test_a_kernel_that_leaves_without_a_word(fake, artifact):
    with artifact.engine() as engine, pytest.raises(KernelStalled, match="without saying why"):
        list(engine.generate([SILENT]))


def test_an_occupied_gpu_is_a_start_up_error(fake, artifact):
    with artifact.engine() as engine, pytest.raises(WorkersMissing, match="could not start.*another program occupies the GPU") as caught:
        list(engine.generate([MISSING]))
    assert caught.value.stage == "check-in" and caught.value.exit_code == 1 and "\n" not in str(caught.value)


def test_a_crash_has_cudas_name_and_advice(fake, artifact):
    engine = artifact.engine()
    with pytest.raises(EnvironmentFailure, match="CUDA_ERROR_ILLEGAL_ADDRESS .*start the program again") as caught:
        list(engine.generate([CRASH]))
    assert "\n" not in str(caught.value) and not threads()
    with pytest.raises(CudaError):
        engine.generate([3])
    engine.close()  # says nothing: there is nothing left to give back


def test_memory_that_is_not_there_is_named(fake, make_artifact, artifact):
    with pytest.raises(EnvironmentFailure, match=r"no GPU memory for KV caches of 48 positions: 2147483648 bytes are needed, \d+ of the GPU's 1073741824 bytes are free"):
        fake.facts = (*FACTS[:7], 1 << 31, *FACTS[8:])
        make_artifact(kv_bytes=1 << 31).engine()
    gc.collect()
    assert not fake.gpu_memory and not fake.alive and not fake.retained
    fake.facts = FACTS
    fake.failures["cuMemHostAlloc"] = error("OUT_OF_MEMORY")
    with pytest.raises(EnvironmentFailure, match="OUT_OF_MEMORY|no host memory"):
        artifact.engine()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda fake: fake.attributes.update(COMPUTE_CAPABILITY_MAJOR=8), r"GPU 0 \(Fake H200\) has compute capability 8.0, .* needs 9.0"),
        (lambda fake: fake.attributes.update(MULTIPROCESSOR_COUNT=114), "compiled for 132 multiprocessors, .* has 114; compile again with --workers 114"),
        (lambda fake: fake.attributes.update(MAX_SHARED_MEMORY_PER_BLOCK_OPTIN=99), f"needs {SHARED} bytes of shared memory in a block, .* has 99"),
        (lambda fake: setattr(fake, "version", 12040), r"built with CUDA 13.5, the driver supports CUDA up to 12.4; update the driver"),
        (lambda fake: fake.failures.update(cuModuleLoadData=error("NO_BINARY_FOR_GPU")), r"cannot load its binary \(NO_BINARY_FOR_GPU\); update the driver"),
    ],
)
def test_machines_that_do_not_fit(fake, artifact, change, message):
    change(fake)
    with pytest.raises(MachineMismatch, match=message) as caught:
        artifact.engine()
    assert caught.value.exit_code == 1 and "\n" not in str(caught.value)
    del caught
    gc.collect()
    assert not fake.alive and not fake.retained


def test_an_engine_takes_other_kernels_of_its_artifact(fake, artifact, expected):
    with artifact.engine() as engine, engine.session() as session:
        first = ids(engine.generate([3, 4], max_tokens=2, session=session))
        uploads = fake.names().count("cuMemcpyHtoDAsync")
        engine.use_kernel(artifact.with_kernel("// other", b"\x7fELF other"))
        assert len([name for name in fake.alive if "module" in name]) == 1, "the former one is unloaded"
        assert fake.names().count("cuMemcpyHtoDAsync") == uploads, "weights stay where they are"
        assert ids(engine.generate([9], max_tokens=3, session=session)) == expected([3, 4, *first, 9], 3)
        with pytest.raises(MachineMismatch, match="cannot load its binary"):
            engine.use_kernel(artifact.with_kernel("// broken", b"rubbish"))
        assert ids(engine.generate([3, 4], max_tokens=2)) == first
    assert not fake.alive


def test_a_gate_holds_for_the_kind_of_gpu_it_passed_on(fake, make_artifact, monkeypatch):
    gate = {"passed": True, "machine": device_id("h200"), "rel_rmse": 1e-6, "limit": 1e-4, "stages": []}
    artifact = make_artifact(gate=gate)
    assert passed_gate(artifact)["rel_rmse"] == 1e-6
    monkeypatch.setattr(FakeDriver, "_cuDeviceGetName", lambda self, length, device: b"NVIDIA H200 NVL\0")
    assert passed_gate(artifact) is None


def test_tuning_swaps_kernels_and_writes_the_best(fake, make_artifact, monkeypatch, tmp_path):
    """The whole of `kogc tune` for an h200, but for the compiler and the clock."""
    gate = {"passed": True, "machine": device_id("h200"), "rel_rmse": 1e-6, "limit": 1e-4, "stages": []}
    knobs = ("WINDOW = 3;  // chunks", "BULK_WINDOW = 5;  // of them", "DRAIN = 16;  // fragments")
    artifact = make_artifact(source="".join(f"constexpr int {knob}\n" for knob in knobs), gate=gate)

    def build(source: str):
        path = tmp_path / "kernel.cubin"
        path.write_bytes(b"\x7fELF " + source.encode())
        return path

    def binary_facts(path):
        if b"BULK_WINDOW = 8" in path.read_bytes():
            raise PlanRejected("the kernel does not fit into registers")
        return {"resources": {"registers": 168}}

    def compare(bench, base, candidate, what):
        return Comparison((100.0,) * 3, (120.0 if "WINDOW = 4" in what else 90.0,) * 3)

    monkeypatch.setattr(toolchain, "build", build)
    monkeypatch.setattr(toolchain, "binary_facts", binary_facts)
    monkeypatch.setattr(toolchain, "toolchain_facts", lambda: {"compiler": "NVRTC 13.0"})
    monkeypatch.setattr(Bench, "compare", compare)
    monkeypatch.setattr("kogc.tune.ceiling_share", lambda *asked: None)
    done = tune(artifact, tmp_path / "tuned.kog")
    assert done.written and done.tuned == {"WINDOW": 4, "BULK_WINDOW": 4}
    tried = {"WINDOW": (2, 4), "BULK_WINDOW": (4, 6, 8), "DRAIN": (0, 8, 24)}
    assert [(trial.knob, trial.value) for trial in done.trials] == [(knob, value) for knob, values in tried.items() for value in values]
    assert [trial.note for trial in done.trials if (trial.knob, trial.value) == ("BULK_WINDOW", 8)] == ["the kernel does not fit into registers"]
    written = load(tmp_path / "tuned.kog")
    assert bytes(written.binary) == b"\x7fELF " + written.source.encode() and "BULK_WINDOW = 4;  // of them" in written.source
    assert written.manifest.toolchain == {"compiler": "NVRTC 13.0"} and written.manifest.meta["resources"] == {"registers": 168}
    assert not fake.alive


def test_binaries_that_do_not_belong(fake, make_artifact):
    with pytest.raises(MachineMismatch, match="cannot load its binary"):
        make_artifact(binary=b"rubbish").engine()
    with pytest.raises(ArtifactError, match=r"do not belong together \(context|capacity: 48 and 47\)"):
        make_artifact(context=47).engine()
    fake.facts = (LAUNCH_VERSION + 1, *FACTS[1:])
    with pytest.raises(ArtifactError, match="launch version"):
        make_artifact().engine()
    fake.facts = FACTS[:3]
    with pytest.raises(ArtifactError, match="kogc_facts has 24 bytes"):
        make_artifact().engine()
    fake.failures["cuModuleGetFunction"] = error("NOT_FOUND")
    with pytest.raises(ArtifactError, match="no kernel of kogc"):
        make_artifact().engine()


def test_a_context_that_cannot_be_had(fake, artifact):
    fake.failures["cuDevicePrimaryCtxRetain"] = error("OUT_OF_MEMORY")
    with pytest.raises(EnvironmentFailure, match="GPU 0 cannot be used.*another program may have all of it"):
        artifact.engine()


# ── choosing ──


def test_a_gpu_is_chosen_by_number(fake, artifact, monkeypatch):
    fake.gpus = 2
    monkeypatch.setenv("KOGC_GPU", "1")
    with artifact.engine() as engine:
        assert engine._device._gpu.ordinal == 1
    for wrong in ("2", "x", "-1"):
        monkeypatch.setenv("KOGC_GPU", wrong)
        with pytest.raises(BadInput, match=f"KOGC_GPU is '{wrong}', expected the number of a GPU from 0 to 1"):
            artifact.engine()


def test_obstacles(fake, monkeypatch):
    assert CudaDevice.obstacle() is None
    fake.attributes["COMPUTE_CAPABILITY_MAJOR"] = 12
    assert CudaDevice.obstacle() == "GPU 0 (Fake H200) has compute capability 12.0, not 9.0"
    fake.gpus = 0
    assert "no NVIDIA GPU" in CudaDevice.obstacle()


def test_no_driver_and_no_gpu(monkeypatch):
    from cuda.bindings import driver as bindings

    for outcome, message in (((error("NO_DEVICE"),), "no NVIDIA GPU here"), (RuntimeError("no libcuda"), "no NVIDIA driver on this machine")):
        monkeypatch.setattr(bindings, "cuInit", raising(outcome))
        monkeypatch.setattr(bindings, "cuGetErrorString", lambda status: (status, b""))
        cuda_driver.load_driver.cache_clear()
        with pytest.raises(EnvironmentFailure, match=message):
            cuda_driver.load_driver()


def raising(outcome):
    def call(flags):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return call


# ── neighbours and ends ──


def test_other_peoples_context_stays_current(fake, artifact, expected):
    fake.contexts.append("of somebody else")
    with artifact.engine() as engine:
        assert fake.contexts == ["of somebody else"]
        assert ids(engine.generate([3], max_tokens=3)) == expected([3], 3)
    gc.collect()
    assert fake.contexts == ["of somebody else"]
    fake.contexts.clear()


def test_closing_frees_everything_once_the_kernel_has_left(fake, artifact):
    engine = artifact.engine()
    session = engine.session()
    engine.generate([STUCK], session=session)
    fake.calls.clear()
    engine.close()
    engine.close()
    names = fake.names()
    assert names.index("cuMemcpyHtoDAsync") < names.index("cuMemFree") < names.index("cuModuleUnload")
    assert not fake.gpu_memory and not fake.alive
    del engine, session
    gc.collect()
    assert not fake.host_memory and not fake.retained


def test_a_forgotten_engine_frees_everything(fake, artifact, expected):
    assert ids(artifact.engine().generate([3], max_tokens=3)) == expected([3], 3)
    gc.collect()
    assert not fake.gpu_memory and not fake.host_memory and not fake.alive and not fake.retained


def test_small_pinned_memory_is_used_again(fake, artifact):
    with artifact.engine() as engine:
        ids(engine.generate([3], max_tokens=3))
        gc.collect()
        fake.calls.clear()
        for _ in range(5):
            ids(engine.generate([3], max_tokens=3))
            gc.collect()
        assert "cuMemHostAlloc" not in fake.names()


def test_the_runtime_does_not_import_torch():
    code = "import sys, kogc.runtime.cuda; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code]).returncode == 0
