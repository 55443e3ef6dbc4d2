"""Finding a compiler, building once, saying what is wrong, and the ziglang wheel as the compiler of last resort."""

import ctypes
import os
import threading
from pathlib import Path

import pytest

from kogc.errors import EnvironmentFailure, ToolchainError
from kogc.targets.cpu import features, toolchain
from kogc.targets.run_tool import first_errors

pytestmark = pytest.mark.compiler

ANSWER = 'extern "C" int answer() {{ return {}; }}'
#: What kernels are made of: atomics, threads, vectors, half precision, functions of libm.
THREADS = """
#include <atomic>
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <time.h>
typedef float vec __attribute__((vector_size(32)));
static std::atomic<int> count;
static void* work(void*) { count.fetch_add(1); return nullptr; }
extern "C" int answer() {
  pthread_t threads[4];
  for (auto& thread : threads) pthread_create(&thread, nullptr, work, nullptr);
  for (auto& thread : threads) pthread_join(thread, nullptr);
  vec v = {1, 2, 3};
  v = v * v;
  volatile float x = 2;
  return count + (int)v[2] + (int)sqrtf(x) + (int)expf(x);
}
"""


def call(library: Path) -> int:
    return ctypes.CDLL(str(library)).answer()


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache, and nothing remembered about compilers."""
    monkeypatch.setenv("KOGC_CACHE_DIR", str(tmp_path / "cache"))
    toolchain._tried.cache_clear()
    toolchain._features.cache_clear()
    yield monkeypatch
    toolchain._tried.cache_clear()
    toolchain._features.cache_clear()


def count_runs(monkeypatch) -> list[list[str]]:
    runs: list[list[str]] = []
    original = toolchain._run
    monkeypatch.setattr(toolchain, "_run", lambda command, folder: (runs.append(list(command)), original(command, folder))[1])
    return runs


def test_a_library_is_built_once(fresh):
    runs = count_runs(fresh)
    first = toolchain.build(ANSWER.format(1))
    assert call(first) == 1
    runs.clear()
    assert toolchain.build(ANSWER.format(1)) == first and not runs


def test_everything_that_matters_makes_another_library(fresh):
    libraries = {
        toolchain.build(ANSWER.format(1)),
        toolchain.build(ANSWER.format(2)),
        toolchain.build(ANSWER.format(1), defines=("KOGC_PROBE",)),
        toolchain.build(ANSWER.format(1), defines=("KOGC_PROBE=2",)),
    }
    fresh.setattr(toolchain, "host_features", lambda: frozenset({"another"}))
    libraries.add(toolchain.build(ANSWER.format(1)))
    assert len(libraries) == 5


def test_defines_reach_the_source(fresh):
    source = 'extern "C" int answer() {\n#ifdef SIX\n  return 6;\n#else\n  return 5;\n#endif\n}'
    assert call(toolchain.build(source)) == 5
    assert call(toolchain.build(source, ("SIX",))) == 6


def test_builds_of_many_threads_do_not_collide(fresh):
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(toolchain.build(ANSWER.format(77)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1 and len(results) == 4
    assert not list(results[0].parent.glob("build-*"))


def test_errors_show_the_place(fresh):
    with pytest.raises(ToolchainError, match=r"kernel.cpp:2:\d+: error: .*nowhere") as caught:
        toolchain.build("int a;\nint b = nowhere;\n")
    assert caught.value.exit_code == 1 and "\n" not in str(caught.value)
    assert not list(Path(os.environ["KOGC_CACHE_DIR"]).glob("kernels/build-*"))


def test_first_errors_count_the_rest():
    text = "In file included\nk.cpp:1:1: error: a\n note\nk.cpp:2:1: error: b\nk.cpp:3:1: fatal error: c\nk.cpp:4:1: error: d\n"
    assert first_errors(text) == "k.cpp:1:1: error: a | k.cpp:2:1: error: b | k.cpp:3:1: fatal error: c (and 1 more)"
    assert first_errors("ld: cannot find -lx\n") == "ld: cannot find -lx"


def test_a_chosen_compiler_must_work(fresh):
    fresh.setenv("KOGC_CXX", "/nowhere/c++ -v")
    with pytest.raises(ToolchainError, match=r"/nowhere/c\+\+ -v .*does not exist; unset KOGC_CXX"):
        toolchain.build(ANSWER.format(1))
    fresh.setenv("KOGC_CXX", "/bin/true")
    with pytest.raises(ToolchainError, match="the chosen compiler does not work"):
        toolchain.build(ANSWER.format(1))


def test_a_broken_system_compiler_is_passed_over(fresh, tmp_path):
    broken = tmp_path / "bin" / "c++"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho broken 1.0\n[ \"$1\" = --version ] || { echo 'x: error: no headers' >&2; exit 1; }\n")
    broken.chmod(0o755)
    fresh.setattr(toolchain, "SYSTEM_COMPILERS", (str(broken), *toolchain.SYSTEM_COMPILERS))
    found = toolchain.find_compilers()
    assert not found[0].works and "no headers" in found[0].problem and found[0].version == "broken 1.0"
    assert toolchain.compiler().path != str(broken)


def test_no_compiler_at_all(fresh):
    fresh.setattr(toolchain, "SYSTEM_COMPILERS", ())
    fresh.setattr(toolchain, "_zig_command", lambda: None)
    with pytest.raises(ToolchainError, match="no working C.. compiler; install g"):
        toolchain.build(ANSWER.format(1))


def test_found_compilers_say_what_they_are(fresh):
    for compiler in toolchain.find_compilers():
        assert compiler.works, compiler.problem
        assert compiler.version and Path(compiler.path).exists()


def test_an_unwritable_cache_names_the_variable(fresh):
    fresh.setenv("KOGC_CACHE_DIR", "/proc/nowhere")
    with pytest.raises(EnvironmentFailure, match="set KOGC_CACHE_DIR"):
        toolchain.build(ANSWER.format(1))


def test_no_fast_math():
    assert not any("fast-math" in flag or "finite-math" in flag for flag in toolchain.FLAGS)
    source = '#include <math.h>\nextern "C" int answer() { volatile float x = NAN; float y = x; return y != y; }'
    assert call(toolchain.build(source)) == 1


def test_features_are_the_machines_own():
    needed = toolchain.required_features()
    assert features.missing_features(needed) == []
    assert toolchain.simd_width() in (4, 8, 16)


def test_features_of_another_cpu():
    if features.machine() != "x86_64":
        pytest.skip("asks for x86 features")
    needed = toolchain.required_features("x86-64-v4")
    assert {"avx2", "fma", "f16c", "avx512f"} <= set(needed) and toolchain.simd_width("x86-64-v4") == 16
    assert toolchain.required_features("x86-64").count("avx2") == 0 and toolchain.simd_width("x86-64") == 4


def test_missing_features(monkeypatch):
    monkeypatch.setattr(features, "host_features", lambda: frozenset({"avx2"}))
    assert features.missing_features(("avx2", "avx512f")) == ["avx512f"]
    monkeypatch.setattr(features, "host_features", lambda: None)
    assert features.missing_features(("avx2", "avx512f")) == []


def test_cpuinfo_of_both_kinds():
    assert features._from_cpuinfo("processor : 0\nflags\t\t: fpu avx2\n\nprocessor : 1\nflags : other\n") == {"fpu", "avx2"}
    assert features._from_cpuinfo("Features\t: fp asimd\n") == {"fp", "asimd"}
    assert features._from_cpuinfo("nothing") is None


@pytest.mark.slow
def test_the_ziglang_wheel_builds_kernels(monkeypatch):
    """Also where a system compiler exists. The first use on a machine takes longest: the wheel unpacks itself."""
    pytest.importorskip("ziglang")
    monkeypatch.setenv("KOGC_CXX", "zig")
    chosen = toolchain.compiler()
    assert chosen.is_zig and chosen.version.startswith("zig ") and chosen.origin == "$KOGC_CXX"
    assert call(toolchain.build(THREADS)) == 4 + 9 + 1 + 7
    assert set(toolchain.required_features()) <= set(features.host_features() or toolchain.required_features())
    if features.machine() == "x86_64":
        assert "avx2" in toolchain.required_features("x86-64-v3")
    with pytest.raises(ToolchainError, match=r"kernel.cpp:1:\d+: error"):
        toolchain.build("int a = nowhere;")


def test_the_system_compiler_builds_the_same():
    assert call(toolchain.build(THREADS)) == 4 + 9 + 1 + 7


@pytest.mark.parametrize("rubbish", [lambda data: data[: len(data) // 3], lambda data: b""])
def test_damaged_files_in_the_cache_are_made_again(fresh, rubbish):
    source = ANSWER.format(7)
    library, features = toolchain.build(source), toolchain.required_features()
    whole = {path: path.read_bytes() for path in library.parent.glob("*.*") if path.suffix in (".so", ".macros")}
    assert {path.suffix for path in whole} == {".so", ".macros"}
    for path, data in whole.items():
        path.unlink()  # and not in place: this process may have it loaded
        path.write_bytes(rubbish(data))
    toolchain._tried.cache_clear()
    toolchain._features.cache_clear()
    assert toolchain.required_features() == features
    assert call(toolchain.build(source)) == 7


def test_a_chosen_compiler_that_is_no_command(fresh):
    fresh.setenv("KOGC_CXX", "g++ 'oops")
    with pytest.raises(ToolchainError, match="KOGC_CXX is .* not a command"):
        toolchain.compiler()
