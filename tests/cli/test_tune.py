"""``kogc tune``: what it prints, and what it refuses."""

import dataclasses
import json

import pytest

from kogc import tune_knobs
from kogc import tune as tuning
from kogc.artifact import MANIFEST, load
from kogc.artifact_writer import ArtifactWriter
from kogc.runtime.device import why_no_device
from kogc.tune_bench import Bench
from kogc.tune_search import Comparison

pytestmark = pytest.mark.compiler


def written_again(path, *, without=(), source=None, **facts):
    """The artifact at ``path`` with manifest fields, or the source, replaced, and without some members."""
    artifact = load(path)
    with ArtifactWriter(path, 1 << 20) as writer:
        for name in artifact.members:
            if name != MANIFEST and name not in without:
                writer.add(name, source.encode() if source and name == "kernel.cpp" else bytes(artifact.member(name)))
        writer.seal(dataclasses.replace(artifact.manifest, **facts))
    return path


@pytest.fixture
def told_clock(monkeypatch):
    """Two candidates, of which the first is slower and the second as many times as fast as told."""

    def decide(ratio):
        def compare(bench, base, candidate, what):
            speed = 90.0 if what == "PREFETCH_BYTES = 1024" else 100.0 * ratio
            return Comparison((100.0, 99.0, 101.0), (speed,) * 3)

        monkeypatch.setattr(tuning, "knobs_of", lambda artifact: {"PREFETCH_BYTES": (1024, 2048, 4096)})
        monkeypatch.setattr(Bench, "compare", compare)

    return decide


def test_it_says_what_was_measured_and_what_was_stored(kogc, tiny_kog, told_clock):
    told_clock(1.2)
    done = kogc("tune", tiny_kog)
    assert done.code == 0, done.err
    slower, faster = (line.split() for line in done.out.splitlines()[1:3])
    assert slower == ["PREFETCH_BYTES", "1024", "90.0", "100.0", "0.900", "0.020", "no"]
    assert faster == ["PREFETCH_BYTES", "4096", "120.0", "100.0", "1.200", "0.020", "yes"]
    assert "120.0 tok/s = " in done.out and "accuracy gate passed" in done.out
    assert "PREFETCH_BYTES = 4096 (was 2048), 1.200 × as fast as before" in done.out
    summary = kogc("inspect", tiny_kog)
    assert "tuned                PREFETCH_BYTES = 4096" in summary.out and "accuracy gate passed" in summary.out
    assert json.loads(kogc("inspect", tiny_kog, "--json").out)["tuned"] == {"PREFETCH_BYTES": 4096}
    assert "tok/s" in kogc("run", tiny_kog, "--ids", "1,2", "--max-tokens", "9").err, "the gate's record holds for the new kernel"
    assert kogc("verify", tiny_kog).code == 0


def test_it_says_that_nothing_is_faster(kogc, tiny_kog, told_clock, tmp_path):
    told_clock(1.01)
    before = tiny_kog.read_bytes()
    done = kogc("tune", tiny_kog)
    assert done.code == 0 and "no (spread)" in done.out and f"{tiny_kog} was not touched" in done.out and tiny_kog.read_bytes() == before
    assert "x.kog was not written" in kogc("tune", tiny_kog, "-o", tmp_path / "x.kog").out and not (tmp_path / "x.kog").exists()
    assert "tuned" not in kogc("inspect", tiny_kog).out


@pytest.mark.full
def test_json_with_the_clock_of_this_machine(kogc, tiny_kog, tmp_path):
    done = kogc("tune", tiny_kog, "-o", tmp_path / "x.kog", "--tokens", "8", "--context", "20", "--runs", "5", "--json")
    assert done.code == 0 and done.out.count("\n") == 1, done.err
    result = json.loads(done.out)
    assert len(result["trials"]) == 4 and all(len(trial["runs_tok_s"]) == 5 for trial in result["trials"])
    assert (result["tokens"], result["context"], result["runs"], result["gate"]["passed"]) == (8, 20, 5, True)
    assert result["written"] == (tmp_path / "x.kog").exists() == bool(result["tuned"])


def refused(done, *words, code=2):
    assert done.code == code and not done.out, done
    for word in words:
        assert word in done.line, done.line


def test_files_that_are_no_artifact(kogc, tiny_pt, tmp_path):
    refused(kogc("tune", tmp_path / "absent.kog"), "absent.kog does not exist")
    refused(kogc("tune", tiny_pt), "tiny.pt: this is not a kogc artifact")
    refused(kogc("tune", tmp_path), "is a folder")


def test_an_artifact_without_weights(kogc, tiny_kog):
    written_again(tiny_kog, without=["weights/rank-0.bin"], sections=())
    refused(kogc("tune", tiny_kog), "tiny.kog holds no weights", "--no-weights")


def test_an_artifact_whose_gate_has_not_passed_here(kogc, tiny_kog):
    written_again(tiny_kog, gate=None, model="another")
    refused(kogc("tune", tiny_kog), "no accuracy gate", f"kogc verify {tiny_kog}")


def test_targets_without_knobs_and_unknown_ones(kogc, tiny_kog, monkeypatch):
    monkeypatch.setattr(tune_knobs, "target_facts", lambda name: {})
    refused(kogc("tune", tiny_kog), "target cpu, which has no knobs")
    written_again(tiny_kog, target="z80")
    refused(kogc("tune", tiny_kog), "target z80", "cpu, h200")


def test_a_source_of_another_kogc(kogc, tiny_kog):
    source = load(tiny_kog).source.replace("constexpr int WAIT_PREFETCH_BYTES", "constexpr int64_t WAIT_PREFETCH_BYTES")
    written_again(tiny_kog, source=source)
    refused(kogc("tune", tiny_kog), "does not set WAIT_PREFETCH_BYTES", "compile the model again")


def test_an_h200s_artifact_without_a_gpu(kogc, tiny_kog):
    if why_no_device("h200") is None:
        pytest.skip("this machine has an H200")
    written_again(tiny_kog, target="h200")
    refused(kogc("tune", tiny_kog), "target h200", "cannot be measured on this machine", "no NVIDIA", code=1)


@pytest.mark.parametrize("options", [("--runs", "4"), ("--context", "64"), ("--tokens", "60"), ("--tokens", "1"), ("--runs", "x")], ids=" ".join)
def test_options_that_do_not_fit(kogc, tiny_kog, options):
    refused(kogc("tune", tiny_kog, *options))


def test_outputs_that_cannot_be_written(kogc, tiny_kog, tiny_pt, tmp_path):
    before = tiny_pt.read_bytes()
    refused(kogc("tune", tiny_kog, "-o", tiny_pt), "is no kogc artifact")
    assert tiny_pt.read_bytes() == before
    done = kogc("tune", tiny_kog, "-o", tmp_path / "no" / "x.kog")
    assert done.code == 1 and "there is no folder" in done.line
    done = kogc("tune", tiny_kog, "-o", tmp_path)
    assert done.code == 1 and "is a folder" in done.line


def test_no_compiler_is_said_once(kogc, tiny_kog, monkeypatch):
    monkeypatch.setenv("KOGC_CXX", "/nowhere/c++")
    done = kogc("tune", tiny_kog)
    assert done.code == 1 and "/nowhere/c++" in done.line
