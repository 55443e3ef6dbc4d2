"""Attention of heads that matrix instructions do not take, as the h200 computes it, by threads of the host that meet like a block's:
whatever group, head_dim and span, every result is written once and is what fp64 says."""

import re
import subprocess
from pathlib import Path

import pytest

from kogc.targets import FOLDER
from kogc.targets.cpu import toolchain

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

#: (query heads to a key, head_dim, first and last position of the span, the step's own, softcap): spans that hold the step's own
#: position and others, one position and several chunks; groups that warps share out evenly, unevenly and not at all.
CASES = [
    (16, 64, 3, 80, 79, 0), (16, 256, 0, 40, 39, 0), (16, 112, 5, 60, 200, 30), (9, 96, 0, 33, 20, 0), (12, 40, 0, 300, 299, 0),
    (7, 192, 1, 45, 44, 0), (3, 32, 0, 50, 49, 0), (13, 80, 0, 1, 0, 0), (1, 36, 0, 77, 76, 0), (2, 90, 0, 20, 25, 0),
]  # fmt: skip


@pytest.mark.parametrize("keys_at_once", [1, 2])
@pytest.mark.parametrize("storage", ["fp32", "fp16"])
def test_every_result_is_there_once_and_right(storage, keys_at_once, tmp_path):
    h200 = FOLDER / "h200"
    rows = re.search(r"template <int HEAD_DIM>\nstruct CacheRow \{.*?\n\};\n", (h200 / "rows.cuh").read_text(), re.DOTALL)[0]
    code = f"constexpr int KEYS_AT_ONCE = {keys_at_once};\n{rows}{(h200 / 'attention_by_value.cuh').read_text()}"
    harness = Path(__file__).with_name("attend_on_host.cpp").read_text()
    calls = ", ".join(f"error<{group}, {head_dim}>({first}, {last}, {now}, {softcap})" for group, head_dim, first, last, now, softcap in CASES)
    (tmp_path / "attend.cpp").write_text(harness.replace("/*DEVICE CODE*/", code).replace("CASES", calls))
    command = [*toolchain.compiler().command, "-std=c++20", "-O1", "-w", "-pthread", f"-DSTORAGE={storage}", "attend.cpp", "-o", "attend"]
    subprocess.run(command, cwd=tmp_path, check=True)
    errors = subprocess.run([tmp_path / "attend"], capture_output=True, text=True, check=True, timeout=300).stdout.split()
    assert len(errors) == len(CASES) and all(float(error) < 2e-6 for error in errors), dict(zip(CASES, errors, strict=False))
