"""Over a hundred random shapes on the GPU against PyTorch in fp32. `-n 14` (pytest-xdist) runs them side by side."""

from __future__ import annotations

import pytest
from against_torch import assert_computes, random_model
from drawn_shapes import drawn_cases, name_of

import kogc

pytestmark = [pytest.mark.gpu, pytest.mark.compiler]


@pytest.mark.parametrize("case", [pytest.param(case, id=name_of(case)) for case in drawn_cases()])
def test_drawn_shapes_compute_what_pytorch_computes(case, tmp_path):
    module = random_model(case.config, case.capacity, case.dtype, case.seed)
    with kogc.compile(module, "h200", output=tmp_path / "drawn.kog", dtype=case.dtype, gate=False).engine() as engine:
        assert_computes(engine, module, case.capacity, case.dtype)
