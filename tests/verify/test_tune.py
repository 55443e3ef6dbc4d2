"""Tuning the shipped checkpoint on the cpu: real kernels, checks and files; only the clock is made up, so that it decides as told."""

import shutil

import numpy as np
import pytest

from kogc import tune as tuning
from kogc.artifact import load
from kogc.compiler import compile_model
from kogc.demo import checkpoint_path
from kogc.errors import BadInput
from kogc.machine import machine_id
from kogc.speed import passed_gate
from kogc.tune import tune
from kogc.tune_bench import Bench, build_kernel, make_load
from kogc.tune_search import Comparison, ResultsDiffer

pytestmark = pytest.mark.compiler

#: One candidate is one build of seconds.
KNOB, VALUE = "PREFETCH_BYTES", 1024


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    path = tmp_path_factory.mktemp("tune") / "pylane.kog"
    return compile_model(checkpoint_path(), output=path, workers=2).artifact.path


@pytest.fixture
def kog(compiled, tmp_path):
    """A copy that the test may tune."""
    return shutil.copy(compiled, tmp_path / "pylane.kog")


@pytest.fixture
def clock(monkeypatch):
    """``clock(ratio)``: the candidate measures ``ratio`` times the base's speed; there is one candidate."""

    def decide(ratio):
        monkeypatch.setattr(tuning, "knobs_of", lambda artifact: {KNOB: (VALUE,)})
        monkeypatch.setattr(Bench, "compare", lambda bench, base, candidate, what: Comparison((100.0,) * 3, (100.0 * ratio,) * 3))

    return decide


def logits(path):
    with load(path).engine() as engine:
        return engine.logits(list(range(1, 40)))


def test_the_best_is_stored_with_what_entitles_to_it(kog, clock):
    clock(1.25)
    before, said = load(kog), []
    done = tune(load(kog), progress=lambda what, done, total: said.append(what))
    assert done.written and done.tuned == {KNOB: VALUE} and done.start == {KNOB: 2048} and done.tok_s == 125.0 and done.ceiling_share > 0
    after = load(kog)
    after.verify_hashes(again=True)
    assert after.source == before.source.replace(f"{KNOB} = 2048;", f"{KNOB} = {VALUE};") and bytes(after.binary) != bytes(before.binary)
    assert list(after.members) == list(before.members) and np.array_equal(after.weights(), before.weights())
    facts, old = after.manifest, before.manifest
    assert facts.meta["tuned"] == {KNOB: VALUE} and facts.meta["tuning"]["ratio"] == 1.25 and facts.meta["tuning"]["machine"] == machine_id()
    assert (facts.sections, facts.stages, facts.build_key, facts.toolchain) == (old.sections, old.stages, old.build_key, old.toolchain)
    assert passed_gate(after)["rel_rmse"] == old.gate["rel_rmse"] and "bit-identical" in facts.gate["carried"]
    assert np.array_equal(logits(kog).view(np.uint32), logits(before.path).view(np.uint32))
    assert {f"building the kernel with {KNOB} = {VALUE}", "writing the artifact"} <= set(said)


def test_a_tuned_artifact_counts_as_compiled(kog, clock):
    clock(1.25)
    tune(load(kog))
    again = compile_model(checkpoint_path(), output=kog, workers=2)
    assert again.cached and again.artifact.manifest.meta["tuned"] == {KNOB: VALUE}


def test_it_goes_elsewhere_when_told(kog, clock, tmp_path):
    clock(1.25)
    before = kog.read_bytes()
    done = tune(load(kog), tmp_path / "tuned.kog")
    assert kog.read_bytes() == before and done.artifact.path == tmp_path / "tuned.kog" and f"{KNOB} = {VALUE};" in done.artifact.source


def test_nothing_is_touched_when_nothing_is_faster(kog, clock, tmp_path):
    clock(0.99)
    before = kog.stat()
    done = tune(load(kog), tmp_path / "tuned.kog")
    assert not done.written and done.tuned == {} and done.final is None and done.tok_s == 100.0
    assert not tune(load(kog)).written
    assert kog.stat() == before and [path.name for path in tmp_path.iterdir()] == ["pylane.kog"]


@pytest.mark.parametrize("moment", ["checking the kernel", "writing the artifact"])
def test_ctrl_c_leaves_the_file_as_it_was(kog, clock, tmp_path, moment):
    clock(1.25)

    def interrupt(what, done, total):
        if what.startswith(moment):
            raise KeyboardInterrupt

    before = kog.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        tune(load(kog), progress=interrupt)
    assert kog.read_bytes() == before and [path.name for path in tmp_path.iterdir()] == ["pylane.kog"]


def test_a_kernel_that_computes_otherwise_is_refused(compiled):
    artifact = load(compiled)
    with artifact.engine() as engine:
        bench = Bench(engine, make_load(artifact, 8, 30, 3), lambda what, done, total: None)
        kernel = build_kernel(artifact, {KNOB: VALUE})
        bench.check(kernel)
        assert len(bench.compare(artifact, kernel, "the clock of this machine").candidate) == 3
        # What another kernel would say, as the first bit of its logits, and as its tokens.
        bench._logits = bench._logits.copy()
        bench._logits.view(np.uint32)[7, 0] ^= 1
        with pytest.raises(ResultsDiffer, match="its logits at position 7 are not"):
            bench.check(kernel)
        bench._logits.view(np.uint32)[7, 0] ^= 1
        bench._tokens = bench._tokens[::-1]
        with pytest.raises(ResultsDiffer, match="its tokens behind a context of 30"):
            bench.check(kernel)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"runs": 4}, "runs is 4"),
        ({"runs": 1}, "runs is 1"),
        ({"context": 256}, "it can be 1 to 255"),
        ({"context": 0}, "context is 0"),
        ({"tokens": 1}, "room for 2 to 129"),
        ({"tokens": 58, "context": 200}, "behind 200 others, .* has room for 2 to 57"),
    ],
)
def test_loads_that_do_not_fit(compiled, options, message):
    with pytest.raises(BadInput, match=message):
        tune(load(compiled), **options)


def test_the_usual_load_is_at_most_what_fits(compiled):
    load_of = make_load(load(compiled), None, None, 3)
    assert (load_of.context, load_of.tokens, load_of.runs) == (128, 64, 3)
    assert make_load(load(compiled), None, 255, 3).tokens == 2
