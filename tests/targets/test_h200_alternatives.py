"""A kernel that does not fit into registers is emitted again with the numbers that target.toml offers instead, one choice after the other."""

import dataclasses
import re

import pytest
from planning import model_of, planned

from kogc.compile_build import build_plan
from kogc.errors import PlanRejected
from kogc.targets import load_target, with_values
from kogc.targets.h200 import ROW_K, toolchain

FIRST, SECOND = {"BULK_WINDOW": 6}, {"WINDOW": 2, "BATCH_UNITS": 16}
TARGET = dataclasses.replace(load_target("h200"), facts={**load_target("h200").facts, "alternatives": [FIRST, SECOND]})
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "intermediate_size": 96, "vocab_size": 101, "max_position_embeddings": 64,
}  # fmt: skip


def constants(source: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"constexpr int (WINDOW|BULK_WINDOW|BATCH_UNITS) = (\d+);", source)}


OWN = {"WINDOW": 3, "BULK_WINDOW": 5, "BATCH_UNITS": 32}


@pytest.fixture(scope="module")
def plan():
    return planned(model_of(CONFIG), TARGET, 4)


@pytest.fixture
def fitting(monkeypatch, tmp_path):
    """A toolchain in whose eyes only kernels with these constants fit, and the constants of what it was given to build."""
    tried, fits = [], []

    def build(source):
        tried.append(constants(source))
        path = tmp_path / f"{len(tried)}.cubin"
        path.write_text(source)
        return path

    def binary_facts(binary):
        if constants(binary.read_text()) not in fits:
            raise PlanRejected(f"kernel {binary.stem} spills")
        return {"resources": {"registers": 168}}

    monkeypatch.setattr(toolchain, "build", build)
    monkeypatch.setattr(toolchain, "binary_facts", binary_facts)
    return fits, tried


def built(plan):
    return build_plan(plan, TARGET, lambda step, done, total: None)


def test_the_plans_own_kernel_is_taken_when_it_fits(plan, fitting):
    fits, tried = fitting
    fits += [OWN, {**OWN, **FIRST}]
    done = built(plan)
    assert done.planned is plan and tried == [OWN] and done.facts == {"resources": {"registers": 168}}


def test_else_the_first_alternative_that_fits(plan, fitting):
    fits, tried = fitting
    fits += [{**OWN, **SECOND}]
    done = built(plan)
    assert tried == [OWN, {**OWN, **FIRST}, {**OWN, **SECOND}]
    assert done.facts == {"resources": {"registers": 168}, "alternative": SECOND} and constants(done.planned.rendered.source) == {**OWN, **SECOND}
    assert done.binary.read_text() == done.planned.rendered.source != plan.rendered.source
    assert (done.planned.schedule, done.planned.indices) == (plan.schedule, plan.indices)


def test_when_none_fits_the_error_is_about_the_plans_own(plan, fitting):
    with pytest.raises(PlanRejected, match=r"^kernel 1 spills; and none of its 2 alternatives does$"):
        built(plan)


def test_without_alternatives_the_error_is_as_it_was(plan, fitting):
    bare = dataclasses.replace(TARGET, facts={**TARGET.facts, "alternatives": []})
    with pytest.raises(PlanRejected, match=r"^kernel 1 spills$"):
        build_plan(plan, bare, lambda step, done, total: None)


@pytest.mark.parametrize("name", ["NO_SUCH", "title"])
def test_what_is_no_number_is_no_alternative(name):
    with pytest.raises(KeyError, match=name):
        with_values(TARGET, {name: 1})


@pytest.mark.slow
def test_those_of_the_target_are_other_kernels_for_the_same_plan():
    """On a model whose vector fills the registers as far as it may."""
    target = load_target("h200")
    model = model_of({**CONFIG, "intermediate_size": 8 * ROW_K * target.facts["held_rows"]})
    own = planned(model, target, 4)
    sources = {own.rendered.source}
    for values in target.facts["alternatives"]:
        other = planned(model, with_values(target, values), 4)
        assert other.rendered.plan == own.rendered.plan, "what is packed is read back with the target's own numbers"
        toolchain.binary_facts(toolchain.build(other.rendered.source))
        sources.add(other.rendered.source)
    assert len(target.facts["alternatives"]) > 0 and len(sources) > 1


@pytest.mark.slow
def test_a_head_that_no_lanes_share_out_evenly_takes_one():
    """45 values of two keys, two values and a query are more than a lane has registers for."""
    target = load_target("h200")
    own = planned(model_of({**CONFIG, "head_dim": 90}), target, 4, "fp16")
    with pytest.raises(PlanRejected, match="does not fit into registers"):
        toolchain.binary_facts(toolchain.build(own.rendered.source))
    done = build_plan(own, target, lambda step, done, total: None)
    assert done.facts["alternative"] == {"KEYS_AT_ONCE": 1} and done.facts["resources"]["stack"] == 0
