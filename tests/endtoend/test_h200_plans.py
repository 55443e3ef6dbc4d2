"""Every model has a sync plan that is proven for the h200's full number of workers."""

from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from planning import model_of, planned, preset_of
from random_shapes import laneformer_configs, llama_configs

from kogc import compile_passes, compiler
from kogc.ir.passes.prove import prove
from kogc.ir.program import Schedule
from kogc.models.presets import PRESETS
from kogc.targets import load_target

pytestmark = pytest.mark.slow

TARGET = load_target("h200")
WORKERS = TARGET.facts["workers"]
CONTEXT = 70
FEW = settings(
    max_examples=3, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None, phases=(Phase.explicit, Phase.generate)
)


def idle(plan: Schedule) -> list[int]:
    """Workers without a unit in all of a step."""
    works = [instance for segment in plan.work for stage in segment for instance in stage]
    return [worker for worker in range(plan.workers) if not any(work[worker].runs for work in works)]


def test_workers_are_a_number_that_deals_evenly():
    assert WORKERS == 128


#: Plans of full-size presets take ten seconds and more.
NAMES = [name if "tiny" in name else pytest.param(name, marks=pytest.mark.full) for name in PRESETS]


@pytest.mark.parametrize("name", NAMES)
def test_presets(name):
    with mock.patch.object(compile_passes, "prove", wraps=prove) as proving:
        result = planned(preset_of(name), TARGET, WORKERS)
    assert proving.call_args.kwargs["tagged"] and result.schedule.workers == WORKERS and idle(result.schedule) == []
    assert len(result.program.buffers) > 5 and result.rendered.stages[-1] == "sample"


@pytest.mark.full
@FEW
@given(llama_configs())
def test_small_llamas(config):
    check(config)


@pytest.mark.full
@FEW
@given(laneformer_configs())
def test_small_laneformers(config):
    check(config)


def check(config) -> None:
    """There is a plan, even where some workers have nothing to do at all."""
    assert compiler._plan(model_of(config, CONTEXT), "bf16", WORKERS, False, 1, TARGET, None, lambda step, done, total: None).schedule.workers == WORKERS
