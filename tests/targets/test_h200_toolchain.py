"""CUDA without a GPU: finding a compiler, building once, saying what is wrong, reading resources, disassembling."""

from __future__ import annotations

import pytest

from kogc.errors import PlanRejected, ToolchainError
from kogc.targets.h200 import cuda_files, nvrtc, toolchain
from kogc.targets.h200.cubin import read_array
from kogc.targets.h200.resources import ResourceReport, check_resources, read_report
from kogc.targets.run_tool import first_errors

#: Everything an emitted kernel needs of the language and the headers.
KERNEL = """#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>
struct launch_t { const float* in; float* out; int32_t n; uint64_t big; };
extern "C" __device__ long long kogc_facts[12] = {2, 3, 8, 4, 64, 48, 64, 192, 4, 16, 384, 1024};
extern "C" __global__ void __launch_bounds__(384, 1) kogc_kernel(const __grid_constant__ launch_t launch) {
  __shared__ float near[32];
  near[threadIdx.x & 31] = __half2float(__float2half_rn(launch.in[threadIdx.x]));
  __syncthreads();
  static_assert(sizeof(uint64_t) == 8 && INT32_MAX > 0, "");
#ifdef SPILL
  float a[220];
#pragma unroll
  for (int i = 0; i < 220; ++i) a[i] = launch.in[i * threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 220; ++i) launch.out[i * threadIdx.x] = a[i] * a[(i * 7) % 220];
#endif
#ifdef LOCAL
  float b[2000];
  for (int i = 0; i < 2000; ++i) b[i] = launch.in[i] * 2;
  launch.out[1] = b[launch.n];
#endif
  launch.out[threadIdx.x] = near[(threadIdx.x + 1) & 31];
}
"""
NO_REGISTERS = 'extern "C" __global__ void k(float* x) { asm volatile("setmaxnreg.inc.sync.aligned.u32 224;"); *x = 1; }'


def forget() -> None:
    toolchain._tried.cache_clear()
    nvrtc.find_nvrtc.cache_clear()


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """NVRTC from the wheels, an empty cache, and nothing remembered."""
    monkeypatch.setenv("KOGC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("KOGC_NVCC", "nvrtc")
    forget()
    yield monkeypatch
    forget()


def test_a_cubin_is_built_once(fresh):
    first = toolchain.build(KERNEL)
    assert first.suffix == ".cubin" and first.read_bytes()[:4] == b"\x7fELF"
    fresh.setattr(nvrtc, "compile_cubin", None)
    assert toolchain.build(KERNEL) == first


def test_everything_that_matters_makes_another_cubin(fresh):
    cubins = {toolchain.build(KERNEL), toolchain.build(KERNEL + "\n"), toolchain.build(KERNEL, ("KOGC_PROBE",))}
    fresh.setattr(nvrtc.Nvrtc, "name", property(lambda self: "NVRTC 99.0"))
    forget()
    cubins.add(toolchain.build(KERNEL))
    assert len(cubins) == 4


@pytest.mark.parametrize("suffix", [".cubin", ".json"])
def test_damaged_files_in_the_cache_are_made_again(fresh, suffix):
    cubin = toolchain.build(KERNEL)
    whole, damaged = cubin.read_bytes(), cubin.with_suffix(suffix)
    damaged.write_bytes(damaged.read_bytes()[:-5])
    assert toolchain.build(KERNEL) == cubin and cubin.read_bytes() == whole
    assert toolchain.resource_report(cubin).registers > 0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("__device__ int a = nowhere;\n__global__ void k() {}\n", r'NVRTC 1\d\.\d+.* failed: kernel.cu\(1\): error: identifier "nowhere" is undefined'),
        ('#include "no.h"\n', r'kernel.cu\(1\): catastrophic error: cannot open source file "no.h"'),
        ('extern "C" __global__ void k() { asm("foo.bar;"); }', r"ptxas .*error\s*: "),
        ('extern "C" __global__ void k(float* x) { __shared__ float a[60000]; *x = a[threadIdx.x]; }', "uses too much shared data"),
        ("__device__ int a;\n", "no resource figures; there must be a __global__ function"),
    ],
)
def test_errors_are_one_line_that_says_where(fresh, source, message):
    with pytest.raises(ToolchainError, match=message) as caught:
        toolchain.build(source)
    assert "\n" not in str(caught.value) and "\0" not in str(caught.value) and caught.value.exit_code == 1


def test_ptxas_errors_are_recognised():
    log = "kernel.cu(3): warning #177-D: unused\nptxas application ptx input, line 21; error   : Unknown modifier '.bar'\nptxas fatal   : aborted\n"
    assert first_errors(log) == "ptxas application ptx input, line 21; error   : Unknown modifier '.bar'"


def test_the_report_of_a_good_kernel(fresh):
    cubin = toolchain.build(KERNEL)
    report = toolchain.resource_report(cubin)
    assert 8 <= report.registers <= 168 and report.static_shared == 128 and report.dynamic_shared == 1024
    assert (report.spill_stores, report.spill_loads, report.stack, report.losses) == (0, 0, 0, ())
    facts = toolchain.binary_facts(cubin)
    assert toolchain.describe(facts) == report.line == f"{report.registers} registers, no spills, 1152 bytes of shared memory"


def test_a_spilling_kernel_is_rejected_with_its_figures(fresh):
    cubin = toolchain.build(KERNEL, ("SPILL",))
    report = toolchain.resource_report(cubin)
    assert report.registers == 168 and report.spill_stores > 0 and report.spill_loads > 0
    with pytest.raises(PlanRejected, match=rf"168 registers, {report.spill_stores} \+ {report.spill_loads} bytes of spills"):
        toolchain.binary_facts(cubin)


def test_local_memory_is_rejected_without_spills_too(fresh):
    cubin = toolchain.build(KERNEL, ("LOCAL",))
    report = toolchain.resource_report(cubin)
    assert report.stack >= 8000 and report.spill_stores == 0
    with pytest.raises(PlanRejected, match=f"{report.stack} bytes of stack"):
        check_resources(report)


def test_ignored_register_shifts_are_rejected(fresh):
    with pytest.raises(PlanRejected, match="'setmaxnreg' ignored"):
        toolchain.binary_facts(toolchain.build(NO_REGISTERS))


def test_the_largest_figures_of_all_functions_count():
    log = """ptxas info    : Compiling entry function 'a' for 'sm_90a'
ptxas info    : Function properties for a
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 40 registers, used 2 barriers, 32 bytes cumulative stack size, 256 bytes smem
ptxas info    : Function properties for b
    0 bytes stack frame, 0 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 90 registers, used 1 barriers
"""
    assert read_report(log) == ResourceReport(90, 2, 12, 24, 32, 256)


def test_values_are_read_out_of_a_cubin(fresh):
    cubin = toolchain.build(KERNEL).read_bytes()
    assert read_array(cubin, "kogc_facts") == (2, 3, 8, 4, 64, 48, 64, 192, 4, 16, 384, 1024)
    assert read_array(cubin, "nothing") is None


def test_facts_for_the_manifest_name_no_place_of_this_machine(fresh):
    facts = toolchain.toolchain_facts()
    assert facts["compiler"].startswith("NVRTC 1") and facts["machine"] == "sm_90a" and "/" not in str(facts["flags"])
    assert toolchain.required_features() == ()


def test_no_fast_math():
    assert not any("fast" in flag for flag in toolchain.FLAGS)


def test_a_chosen_compiler_must_work(fresh):
    for command, problem in (("/nowhere/nvcc", "does not exist"), ("/bin/true", "it is no nvcc"), ("nvcc 'oops", "not a command")):
        fresh.setenv("KOGC_NVCC", command)
        forget()
        with pytest.raises(ToolchainError, match=f"{problem}.*KOGC_NVCC|KOGC_NVCC.*{problem}"):
            toolchain.build(KERNEL)


def test_a_broken_nvcc_is_passed_over(fresh, tmp_path):
    broken = tmp_path / "nvcc"
    broken.write_text("#!/bin/sh\necho 'release 11.0, V11.0.1'\n[ \"$1\" = --version ] || { echo 'nvcc fatal: error: no sm_90a' >&2; exit 1; }\n")
    broken.chmod(0o755)
    fresh.setenv("KOGC_NVCC", "")
    fresh.setattr(toolchain.shutil, "which", lambda name, path=None: str(broken))
    found = toolchain.find_compilers()
    assert found[0].version == "nvcc 11.0.1" or "no sm_90a" in found[0].problem
    assert not found[0].works and toolchain.compiler().command == ()


def test_without_any_compiler_the_wheels_are_named(fresh):
    fresh.setattr(nvrtc, "find_libraries", lambda: iter(()))
    forget()
    with pytest.raises(ToolchainError, match=r"no usable NVRTC; `pip install nvidia-cuda-nvrtc nvidia-cuda-runtime`"):
        toolchain.build(KERNEL)


def test_missing_headers_and_a_broken_library_are_named(fresh, tmp_path):
    rubbish = tmp_path / "nvidia" / "lib" / "libnvrtc.so.13"
    rubbish.parent.mkdir(parents=True)
    rubbish.write_bytes(b"rubbish")
    real = nvrtc.find_nvrtc().library
    fresh.setattr(nvrtc, "find_libraries", lambda: iter((rubbish, real)))
    fresh.setattr(nvrtc, "find_headers", lambda library: None)
    nvrtc.find_nvrtc.cache_clear()
    with pytest.raises(ToolchainError, match=r"libnvrtc.so.13 cannot be loaded .*cuda_fp16.h is missing"):
        nvrtc.find_nvrtc()


@pytest.mark.parametrize("layout", ["nvidia/cu13", "nvidia/cuda_nvrtc"])
def test_wheels_of_every_layout_are_found(fresh, tmp_path, layout):
    library = tmp_path / layout / "lib" / "libnvrtc.so.12"
    headers = tmp_path / "nvidia" / "cuda_runtime" / "include"
    for folder in (library.parent, headers):
        folder.mkdir(parents=True)
    for file in (library, headers / "cuda_fp16.h", library.with_name("libnvrtc-builtins.so.12.4"), library.with_name("libnvrtc.alt.so.12")):
        file.touch()
    (headers / "cuda.h").write_text("#define CUDA_VERSION 12040\n")
    fresh.setattr(cuda_files, "wheel_folders", lambda: sorted((tmp_path / "nvidia").glob("*")))
    fresh.setattr(cuda_files, "toolkit_folders", lambda: [])
    assert list(cuda_files.find_libraries()) == [library]
    assert cuda_files.find_headers(library) == headers and cuda_files.headers_version(headers) == "12.4"


def test_nvcc_builds_the_same_kernel(fresh):
    fresh.setenv("KOGC_NVCC", "")
    forget()
    chosen = next((compiler for compiler in toolchain.find_compilers() if compiler.command and compiler.works), None)
    if chosen is None:
        pytest.skip("no working nvcc on this machine")
    report = toolchain.resource_report(toolchain.build(KERNEL))
    assert report.static_shared == 128 and report.dynamic_shared == 1024 and report.stack == 0
    assert toolchain.toolchain_facts()["compiler"].startswith("nvcc ")
    with pytest.raises(ToolchainError, match=r'kernel.cu\(1\): error: identifier "nowhere"'):
        toolchain.build("__device__ int a = nowhere;")


def test_sass_shows_instructions_and_source_lines(fresh):
    if cuda_files.find_program("nvdisasm") is None:
        pytest.skip("no nvdisasm: neither NVIDIA's wheel nor a toolkit nor Triton is installed")
    sass = toolchain.disassemble(toolchain.build(KERNEL).read_bytes())
    assert "kogc_kernel:" in sass and "BAR.SYNC" in sass and "EXIT" in sass
    line = KERNEL[: KERNEL.index("__syncthreads")].count("\n") + 1
    assert f"// kernel.cu:{line}\n" in sass and ".section" not in sass


def test_without_a_disassembler_the_wheel_is_named(fresh):
    from kogc.targets.h200 import disassembler

    fresh.setattr(disassembler, "find_program", lambda name: None)
    with pytest.raises(ToolchainError, match="pip install nvidia-cuda-nvdisasm"):
        toolchain.disassemble(b"")


def test_something_else_than_a_cubin_is_refused(fresh):
    if cuda_files.find_program("nvdisasm") is None:
        pytest.skip("no nvdisasm: neither NVIDIA's wheel nor a toolkit nor Triton is installed")
    with pytest.raises(ToolchainError, match="nvdisasm failed"):
        toolchain.disassemble(b"no cubin")
