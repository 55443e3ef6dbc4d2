"""What speeds are judged by, on the GPU: plain reading of any number of bytes, and the clocks of a profile build."""

import numpy as np
import pytest

import kogc
from kogc.runtime.cuda_ceiling import Reader
from kogc.stage_profile import profile_stages

pytestmark = [pytest.mark.gpu, pytest.mark.compiler]


@pytest.mark.parametrize("nbytes", [16, 17, 127, 128, 4097, 132 * 16384 - 16, 132 * 16384 * 9 + 5, 300_000_007])
def test_any_number_of_bytes_can_be_read(nbytes):
    with Reader(np.zeros(nbytes, np.uint8)) as reader:
        assert all(0 < rate < 50e12 for rate in reader.rounds(2))


def test_the_profile_of_a_token_adds_up(tmp_path):
    artifact = kogc.compile("preset:llama-tiny", "h200", output=tmp_path / "tiny.kog", random_weights=True)
    found = profile_stages(artifact, [1, 2, 3], 40)
    assert [time.stage for time in found.stages] == [stage.name for segment in artifact.program.segments for stage in segment.stages]
    whole = sum(time.wait_token_us + time.work_token_us for time in found.stages)
    assert whole == pytest.approx(found.step_us, rel=1e-6) and 0.3 < found.clock_ghz < 2.2
    assert all(time.wait_us >= 0 and time.work_us >= 0 for time in found.stages) and found.wait_us > 0
