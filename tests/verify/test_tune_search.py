"""What tuning decides, on speeds that no clock made."""

import pytest

from kogc.errors import KernelStalled, NumericError, PlanRejected, ToolchainError
from kogc.targets import target_facts, target_names
from kogc.tune_knobs import with_values
from kogc.tune_search import Comparison, ResultsDiffer, descend

KNOBS = {"NEAR": (1, 2, 4), "FAR": (10, 20)}
START = {"NEAR": 2, "FAR": 10}


class Machine:
    """``speeds``: (NEAR, FAR) → tokens per second, 100 where it says nothing, or what is raised. ``asked``: the comparisons."""

    def __init__(self, speeds, noise=0.0):
        self.speeds, self.noise, self.asked = speeds, noise, []

    def __call__(self, base, candidate):
        self.asked.append((tuple(base.values()), tuple(candidate.values())))
        return Comparison(self.runs(base), self.runs(candidate))

    def runs(self, values):
        speed = self.speeds.get(tuple(values.values()), 100.0)
        if isinstance(speed, Exception):
            raise speed
        return (speed, speed - self.noise, speed + self.noise)


def test_what_is_not_faster_is_not_kept():
    machine = Machine({(1, 10): 99.0, (4, 10): 100.0})
    found = descend(KNOBS, START, machine)
    assert found.values == START and found.final is None and not found.better
    assert machine.asked == [((2, 10), (1, 10)), ((2, 10), (4, 10)), ((2, 10), (2, 20))]
    assert not any(trial.kept for trial in found.trials)


def test_later_values_are_held_against_the_best_so_far():
    machine = Machine({(1, 10): 110.0, (4, 10): 105.0, (1, 20): 120.0})
    found = descend(KNOBS, START, machine)
    assert found.values == {"NEAR": 1, "FAR": 20} and found.better and found.final.ratio == pytest.approx(1.2)
    assert machine.asked == [((2, 10), (1, 10)), ((1, 10), (4, 10)), ((1, 10), (1, 20)), ((2, 10), (1, 20))]
    assert [(trial.knob, trial.value, trial.kept) for trial in found.trials] == [("NEAR", 1, True), ("NEAR", 4, False), ("FAR", 20, True)]


@pytest.mark.parametrize("noise, kept", [(2.4, True), (2.6, False)])
def test_a_gain_within_the_spread_is_none(noise, kept):
    """Five in a hundred against runs that lie twice the noise apart."""
    assert descend({"NEAR": (4,)}, START, Machine({(4, 10): 105.0}, noise)).better is kept


@pytest.mark.parametrize(
    "error",
    [PlanRejected("it spills"), ToolchainError("it does not build"), ResultsDiffer("other logits"), NumericError(1, 1, "head"), KernelStalled("head", 0, 1, 2, 3, 4, 5)],
    ids=lambda error: type(error).__name__,
)
def test_a_candidate_that_cannot_be_used_is_skipped_with_a_note(error):
    found = descend(KNOBS, START, Machine({(1, 10): error, (4, 10): 130.0}))
    assert found.trials[0].note == str(error) and not found.trials[0].kept and found.trials[0].comparison is None
    assert found.values == {"NEAR": 4, "FAR": 10} and found.better
    assert found.trials[0].to_json() == {"knob": "NEAR", "value": 1, "kept": False, "note": str(error)}


def test_other_errors_end_it():
    with pytest.raises(MemoryError):
        descend(KNOBS, START, Machine({(1, 10): MemoryError()}))


def test_what_does_not_stay_faster_is_not_better():
    class Lucky(Machine):
        def runs(self, values):
            return (100.0,) * 3 if len(self.asked) == 4 else super().runs(values)

    found = descend(KNOBS, START, Lucky({(1, 10): 150.0, (1, 20): 100.0}))
    assert found.trials[0].kept and found.final is not None and not found.better


def test_medians_ratio_and_spread():
    compared = Comparison((90.0, 100.0, 101.0), (130.0, 110.0, 120.0))
    assert (compared.base_tok_s, compared.tok_s, compared.ratio, compared.spread) == (100.0, 120.0, 1.2, 0.2)
    assert compared.to_json()["base_runs_tok_s"] == [90.0, 100.0, 101.0]


@pytest.mark.parametrize("target", target_names())
def test_knobs_are_constants_of_their_target(target):
    facts = target_facts(target)
    assert facts["tune"], "there is something to try"
    for name, values in facts["tune"].items():
        assert name in facts["constants"] and len(values) > 1 and all(type(value) is int for value in values)


def test_a_constant_is_replaced_and_nothing_else():
    source = "constexpr int NEAR = 3;  // meaning\nconstexpr int NEARER = 3;\nint x = NEAR;  // constexpr int NEAR = 4;\n"
    assert with_values(source, {"NEAR": 12}) == source.replace("NEAR = 3;  //", "NEAR = 12;  //")
