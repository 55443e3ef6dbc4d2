"""Which binary runs: the artifact's own, one built here from its source, or none, with the reason."""

import pytest

from kogc.codegen.launch import LAUNCH_VERSION
from kogc.errors import ArtifactError, BadInput, MachineMismatch
from kogc.runtime import cpu_library, facts
from kogc.targets.cpu import toolchain
from kogc.targets.cpu.features import machine

pytestmark = pytest.mark.compiler


def generated(artifact):
    with artifact.engine() as engine:
        return [token.id for token in engine.generate([3], max_tokens=3)]


def test_the_own_binary_needs_no_compiler(fake, expected, monkeypatch):
    monkeypatch.setattr(toolchain, "compiler", None)
    assert generated(fake) == expected([3], 3)


@pytest.mark.parametrize(
    "changes",
    [
        {"cpu_features": ("avx2", "avx9")},
        {"toolchain": {"platform": "plan9", "machine": machine()}},
        {"toolchain": {"platform": "linux", "machine": "m68k"}},
    ],
)
def test_another_machines_artifact_is_built_again(make_artifact, expected, changes):
    artifact = make_artifact(binary=b"not for this machine", **changes)
    assert generated(artifact) == expected([3], 3)


def test_without_a_compiler_the_missing_features_are_named(make_artifact, monkeypatch):
    artifact = make_artifact(cpu_features=("avx2", "avx9"))
    monkeypatch.setenv("KOGC_CXX", "/nowhere/c++")
    with pytest.raises(MachineMismatch, match=r"its CPU has avx9.*cannot be built here.*compile the model again") as caught:
        artifact.engine()
    assert caught.value.exit_code == 1


def test_a_binary_that_is_none(make_artifact):
    with pytest.raises(ArtifactError, match="section kernel.so cannot be loaded"):
        make_artifact(binary=b"\x7fELF and nothing else").engine()


def test_a_library_that_is_no_kernel(make_artifact):
    binary = toolchain.build('extern "C" int other() { return 1; }').read_bytes()
    with pytest.raises(ArtifactError, match="section kernel.so cannot be loaded"):
        make_artifact(binary=binary).engine()


def test_an_engine_takes_other_kernels_of_its_artifact(fake, expected):
    """Another kernel answers otherwise; weights, caches and sessions stay."""
    source = fake.source.replace("return (int32_t)(sum % VOCAB);", "return (int32_t)((sum + 1) % VOCAB);")
    other = fake.with_kernel(source, toolchain.build(source).read_bytes())
    with fake.engine() as engine, engine.session() as session:
        first = [token.id for token in engine.generate([3], max_tokens=3, session=session)]
        engine.use_kernel(other)
        session.rewind(2)
        assert [token.id for token in engine.generate([5], max_tokens=1, session=session)] == [(3 + first[0] + 5 + 1) % 64]
        engine.use_kernel(fake)
        session.rewind(2)
        assert [token.id for token in engine.generate([5], max_tokens=3, session=session)] == expected([3, first[0], 5], 3)


def test_an_engine_refuses_kernels_that_do_not_fit(fake, make_artifact, expected):
    with fake.engine() as engine:
        with pytest.raises(BadInput, match="is another artifact than the engine's"):
            engine.use_kernel(make_artifact(source=fake.source + "// other\n"))
        broken = fake.with_kernel("", toolchain.build('extern "C" int other() { return 1; }').read_bytes())
        with pytest.raises(ArtifactError, match="section kernel.so cannot be loaded"):
            engine.use_kernel(broken)
        assert [token.id for token in engine.generate([3], max_tokens=3)] == expected([3], 3)
    with pytest.raises(BadInput, match="the engine is closed"):
        engine.use_kernel(fake)


def test_another_launch_version(make_artifact, monkeypatch):
    monkeypatch.setattr(facts, "LAUNCH_VERSION", 99)
    with pytest.raises(ArtifactError, match=rf"launch version {LAUNCH_VERSION}, this kogc 99; compile the model again"):
        make_artifact().engine()


def test_kernel_and_manifest_must_belong_together(make_artifact):
    with pytest.raises(ArtifactError, match=r"do not belong together \(workers: 3 and 4\)"):
        make_artifact(workers=4).engine()


def test_another_target(make_artifact):
    with pytest.raises(BadInput, match="is for target abacus; this kogc runs cpu, h200"):
        make_artifact(target="abacus").engine(stall_timeout=1)


@pytest.mark.parametrize("rubbish", [lambda data: data[: len(data) // 3], lambda data: b"", lambda data: b"garbage"])
def test_a_damaged_extracted_library_is_written_again(make_artifact, expected, monkeypatch, tmp_path, rubbish):
    """Loading half a library kills the process (SIGBUS), so it must never come to that."""
    artifact = make_artifact()
    binary = bytes(artifact.binary)
    monkeypatch.setenv("KOGC_CACHE_DIR", str(tmp_path / "cache"))
    path = cpu_library._extracted(binary)
    path.write_bytes(rubbish(binary))
    assert generated(artifact) == expected([3], 3)
    assert path.read_bytes() == binary
