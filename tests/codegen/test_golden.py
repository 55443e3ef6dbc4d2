"""What templates make of a small Laneformer for the h200, as a file in the repository: a change in them shows in review.

The machine layer is left out: it is in the repository as it is. After a change that is meant, write the file anew with

    KOGC_GOLDEN=write pytest tests/codegen/test_golden.py
"""

import dataclasses
import difflib
import os
from pathlib import Path

import pytest
from program_fixture import laneformer

from kogc.codegen.pack_index import pack_index
from kogc.codegen.render import render
from kogc.ir.passes.schedule import schedule
from kogc.ir.passes.separate_combine import separate_combine
from kogc.targets import load_target

GOLDEN = Path(__file__).parent / "golden" / "laneformer-h200.cu"
TARGET = load_target("h200")


def emitted() -> str:
    """The kernel without the machine layer, blank lines joined."""
    program = separate_combine(laneformer(dtype="bf16", window=5, layers=3, delay=1), 0)
    program = dataclasses.replace(program, step_tokens=(1,))
    plan = schedule(program, 4, TARGET.tile_rows)
    text = render(program, plan, TARGET, pack_index(program, plan, TARGET.layout)).source
    for section in (*TARGET.machine.before, *TARGET.machine.layer, *TARGET.machine.entry):
        assert text.count(section.strip()) == 1
        text = text.replace(section.strip() + "\n\n", "", 1).replace("\n\n" + section.strip(), "", 1)
    return text


def test_the_golden_kernel_is_emitted():
    text = emitted()
    if os.environ.get("KOGC_GOLDEN") == "write":
        GOLDEN.write_text(text)
    expected = GOLDEN.read_text()
    changes = list(difflib.unified_diff(expected.splitlines(), text.splitlines(), "golden", "emitted", lineterm="", n=1))
    if changes:
        shown = "\n".join(changes[:60])
        pytest.fail(f"the emitted kernel has changed; when that is meant: KOGC_GOLDEN=write pytest {__file__}\n{shown}", pytrace=False)


def test_it_shows_every_kind_of_stage():
    text = GOLDEN.read_text()
    for what in ("stage_embed", "stage_qkv_0", "stage_attention_0", "stage_attention_0_combine", "stage_gate_up_0", "stage_m_1", "stage_head", "stage_sample", "run_sequence"):
        assert f"{what}(" in text
    assert "cp.async.bulk" not in text and "__shfl" not in text
