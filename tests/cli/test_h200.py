"""The commands for target h200 on a machine without a GPU: compiling and looking inside work, running says why not."""

import json
import shutil

import pytest

from kogc.errors import PlanRejected
from kogc.runtime.device import why_no_device
from kogc.targets import target_facts
from kogc.targets.h200 import toolchain
from kogc.targets.h200.cuda_files import find_program

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gpu_kog(tiny_pt, tmp_path_factory):
    from kogc.compiler import compile_model

    path = tmp_path_factory.mktemp("h200") / "tiny.kog"
    compile_model(tiny_pt, "h200", output=path, workers=4, dtype="fp16", gate=False)
    return path


@pytest.fixture
def no_gpu():
    if why_no_device("h200") is None:
        pytest.skip("this machine has an H200")


def test_compiling_needs_no_gpu_and_says_that_the_gate_did_not_run(kogc, tiny_pt, tmp_path, no_gpu):
    path = tmp_path / "tiny.kog"
    done = kogc("compile", tiny_pt, "--target", "h200", "--workers", "4", "--dtype", "fp16", "-o", path, "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["target"] == "h200" and result["workers"] == 4 and result["gate"] is None
    assert "no NVIDIA" in result["gate_note"] and "kogc verify" in result["gate_note"]
    again = kogc("compile", tiny_pt, "--target", "h200", "--workers", "4", "--dtype", "fp16", "-o", path)
    assert again.code == 0 and "unchanged" in again.out and "not run (there is no NVIDIA" in again.out


def test_members_have_the_targets_names(gpu_kog):
    from kogc.artifact import load

    artifact = load(gpu_kog)
    assert {"kernel.cu", "kernel.cubin"} <= set(artifact.members) and not {"kernel.cpp", "kernel.so"} & set(artifact.members)
    assert bytes(artifact.binary[:4]) == b"\x7fELF" and "__global__" in artifact.source
    assert artifact.manifest.toolchain["machine"] == "sm_90a" and artifact.manifest.cpu_features == ()


def test_the_summary_tells_registers_spills_and_shared_memory(kogc, gpu_kog):
    summary = kogc("inspect", gpu_kog).out
    assert "registers, no spills, " in summary and "bytes of shared memory" in summary
    resources = json.loads(kogc("inspect", gpu_kog, "--json").out)["resources"]
    assert resources["registers"] > 0 and resources["spill_stores"] == resources["stack"] == 0 and resources["dynamic_shared"] > 0


def test_the_summary_names_what_was_changed_to_fit_the_kernel_into_registers(kogc, tiny_pt, tmp_path, monkeypatch):
    from kogc.artifact import load
    from kogc.packed import packed_weights

    check, checked = toolchain.binary_facts, []

    def binary_facts(binary):
        checked.append(binary)
        if len(checked) == 1:
            raise PlanRejected("the kernel does not fit into registers")
        return check(binary)

    monkeypatch.setitem(target_facts("h200"), "alternatives", [{"BATCH_UNITS": 16, "held_rows": 8}])
    monkeypatch.setattr(toolchain, "binary_facts", binary_facts)
    path = tmp_path / "other.kog"
    assert kogc("compile", tiny_pt, "--target", "h200", "--workers", "4", "--dtype", "fp16", "-o", path).code == 0
    assert len(set(checked)) == 2 and "BATCH_UNITS = 16;" in load(path).source
    assert load(path).manifest.meta["alternative"] == {"BATCH_UNITS": 16, "held_rows": 8}
    assert packed_weights(load(path)).get("model.embed_tokens.weight").shape == (53, 24)
    assert "alternative          BATCH_UNITS = 16, held_rows = 8: " in kogc("inspect", path).out
    assert json.loads(kogc("inspect", path, "--json").out)["alternative"] == {"BATCH_UNITS": 16, "held_rows": 8}


def test_kernels_that_fit_at_once_have_no_alternative(kogc, gpu_kog):
    assert "alternative" not in kogc("inspect", gpu_kog).out and json.loads(kogc("inspect", gpu_kog, "--json").out)["alternative"] == {}


def test_asm_is_sass(kogc, gpu_kog):
    if find_program("nvdisasm") is None:
        pytest.skip("no nvdisasm: neither NVIDIA's wheel nor a toolkit nor Triton is installed")
    done = kogc("inspect", gpu_kog, "--asm")
    assert done.code == 0 and "kogc_kernel:" in done.out and "EXIT" in done.out and "// kernel.cu:" in done.out


def test_asm_of_a_cpu_kernel_is_its_instructions(kogc, tiny_kog):
    if not (shutil.which("objdump") or shutil.which("llvm-objdump")):
        pytest.skip("no objdump on this machine")
    done = kogc("inspect", tiny_kog, "--asm")
    assert done.code == 0 and "<kogc_run>:" in done.out
    assert kogc("inspect", tiny_kog, "--asm", "--ir").code == 2


def test_structure_is_verified_without_a_gpu(kogc, gpu_kog):
    assert kogc("verify", gpu_kog, "--structure").code == 0


@pytest.mark.parametrize("command", [("run", "--ids", "1,2"), ("verify",)])
def test_running_says_what_is_missing(kogc, gpu_kog, no_gpu, command):
    done = kogc(command[0], gpu_kog, *command[1:])
    assert done.code == 1 and "no NVIDIA" in done.line


def test_more_workers_than_the_gpu_has_multiprocessors_are_refused_at_once(kogc, tiny_pt, tmp_path):
    done = kogc("compile", tiny_pt, "--target", "h200", "--workers", "200", "-o", tmp_path / "t.kog")
    assert done.code == 2 and "132 multiprocessors" in done.line and not (tmp_path / "t.kog").exists()


def test_every_pass_is_dumped_with_the_kernel_as_cuda(kogc, tiny_pt, tmp_path):
    done = kogc("compile", tiny_pt, "--target", "h200", "--workers", "4", "--dtype", "fp16", "--no-gate", "-o", tmp_path / "t.kog", "--dump-ir", tmp_path / "ir")
    assert done.code == 0 and len(list((tmp_path / "ir").glob("*-kernel.cu"))) == 1


def test_doctor_shows_what_cuda_has(kogc):
    done = kogc("doctor", "--json")
    findings = json.loads(done.out)["findings"]
    assert any(finding["what"] == "cuda" and finding["text"].endswith(": used") for finding in findings)
    assert {"sass", "gpu"} <= {finding["what"] for finding in findings}


def test_doctor_says_what_to_install(kogc, monkeypatch):
    from kogc.targets.h200 import nvrtc, toolchain

    monkeypatch.setenv("KOGC_NVCC", "nvrtc")
    monkeypatch.setattr(nvrtc, "find_libraries", lambda: iter(()))
    for cached in (nvrtc.find_nvrtc, toolchain._tried):
        cached.cache_clear()
    done = kogc("doctor")
    assert done.code == 0 and "pip install nvidia-cuda-nvrtc" in done.out
    for cached in (nvrtc.find_nvrtc, toolchain._tried):
        cached.cache_clear()


def test_targets_lists_it(kogc):
    assert "h200" in kogc("targets").out and "h200" in json.loads(kogc("targets", "--json").out)
