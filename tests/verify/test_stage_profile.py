"""From the clocks of a profile build to times of stages, and what is shown of them."""

import xml.etree.ElementTree as ET

import numpy as np
import pytest

from kogc.compiler import compile as compile_model
from kogc.errors import BadInput
from kogc.stage_picture import picture
from kogc.stage_profile import StageProfile, profile_stages, stage_times, table

pytestmark = pytest.mark.compiler

WORKERS, GHZ = 4, 1.7


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    path = tmp_path_factory.mktemp("profile") / "tiny.kog"
    return compile_model("preset:llama-tiny", output=path, random_weights=True, workers=WORKERS, gate=False)


@pytest.fixture(scope="module")
def profile(artifact):
    """Instance i waits (i mod 3) µs and works 2 µs, worker 3 one µs more in the second stage; the first waits for nothing."""
    stages = [stage for *_, stage in artifact.program.instances()]
    waits = np.tile(np.arange(len(stages)) % 3, (WORKERS, 1)).astype(float)
    works = np.full((WORKERS, len(stages)), 2.0)
    second = artifact.program.segments[1].stages[0]
    works[3, [stage is second for stage in stages]] += 1
    waits[:, -1] = 5
    waits[3, -1] -= works[3].sum() - works[0].sum()  # who is late waits less for the token
    works[:, -1] = 0
    begins = np.cumsum(waits + works, axis=1) - waits - works
    stamps = np.stack([begins, begins + waits], axis=2) * GHZ * 1e3 + np.arange(WORKERS)[:, None, None] * 1e9 + 1000
    stamps[:, 0, 1] = 0
    step = float((waits + works).sum(1).mean())
    times, clock = stage_times(artifact.program, stamps.astype(np.int64), step)
    return StageProfile("tiny & co", "h200", "fp16", WORKERS, 9, step, clock, times), second


def test_waits_and_works_are_found_again(artifact, profile):
    found, second = profile
    assert found.clock_ghz == pytest.approx(GHZ, rel=1e-3)
    assert [time.stage for time in found.stages] == [stage.name for segment in artifact.program.segments for stage in segment.stages]
    assert [time.count for time in found.stages] == [segment.count for segment in artifact.program.segments for _ in segment.stages]
    first = found.stages[0]
    assert first.wait_us == 0 and first.work_us == pytest.approx(2, rel=1e-3)
    time = next(time for time in found.stages if time.stage == second.name)
    assert time.slowest == 3 and time.slowest_us == pytest.approx(3, rel=1e-3) and time.work_us == pytest.approx(2.25, rel=1e-3)
    assert sum(time.wait_token_us + time.work_token_us for time in found.stages) == pytest.approx(found.step_us, rel=1e-3)


def test_the_table_names_every_stage_and_adds_up(profile):
    found, _ = profile
    lines = table(found).splitlines()
    assert "position 9" in lines[0] and "1.70 GHz" in lines[0]
    assert len({len(line) for line in lines[2:]}) == 1
    assert all(time.stage in line for time, line in zip(found.stages, lines[4:])) and f"{found.step_us:.1f}" in lines[-1]


def test_the_picture_is_svg_with_two_bars_a_stage(profile):
    found, _ = profile
    root = ET.fromstring(picture(found))
    bars = [rect for rect in root.iter("{http://www.w3.org/2000/svg}rect")][1:]
    assert len(bars) == 2 * len(found.stages)
    width = float(root.get("width"))
    assert all(0 <= float(bar.get("x")) and float(bar.get("x")) + float(bar.get("width")) <= width for bar in bars)
    assert "tiny &amp; co" in picture(found)


def test_a_target_without_clocks_is_refused(artifact):
    with pytest.raises(BadInput, match="kernels for cpu keep no clocks"):
        profile_stages(artifact, [1, 2], 4)
