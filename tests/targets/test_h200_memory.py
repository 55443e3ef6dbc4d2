"""How long a model's vectors may be: the compiler counts a worker's shared memory as the emitted code does."""

import re

import pytest
from planning import model_of, planned

from kogc.codegen import render
from kogc.codegen.worker_memory import ring_slots
from kogc.errors import PlanRejected, ToolchainError
from kogc.targets import load_target
from kogc.targets.h200 import ROW_K, toolchain
from kogc.targets.h200.cubin import read_array

TARGET = load_target("h200")
#: Tells how the emitted code shares out the memory.
SHARES = 'extern "C" __device__ const int64_t kogc_shares[] = {NEAR_BEGIN, SLOTS};\n'
MEMORY = TARGET.memory
#: A vector in whole rows that, beside a script of at most 128 words, leaves the ring its least slots and no more; and one that does not.
LONGEST = ((MEMORY.nbytes - MEMORY.named - MEMORY.least_slots * MEMORY.slot) // 4 - 128) // ROW_K * ROW_K
TOO_LONG = LONGEST + ROW_K + 1


def source_of(width: int) -> str:
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64,
        "intermediate_size": width, "vocab_size": 512, "max_position_embeddings": 64,
    }  # fmt: skip
    return planned(model_of(config), TARGET, 128, "fp16").rendered.source


def constant(source: str, name: str) -> int:
    return int(re.search(rf"constexpr int(?:64_t)? {name} = (\d+);", source)[1])


@pytest.mark.slow
@pytest.mark.parametrize("width, least", [(640, False), (LONGEST, True)])
def test_the_compiler_counts_slots_as_the_kernel_does(width, least):
    source = source_of(width)
    slots = ring_slots(MEMORY, constant(source, "SCRATCH_FLOATS"), constant(source, "SCRIPT_WORDS"))
    found = read_array(toolchain.build(source + SHARES).read_bytes(), "kogc_shares")
    assert found == (MEMORY.named, slots) and (slots == MEMORY.least_slots) == least


def test_longer_vectors_are_refused_in_one_line():
    with pytest.raises(PlanRejected, match=rf"the longest are the {TOO_LONG} values that stage \w*down_proj reads.* beside 5 chunks of weights") as caught:
        source_of(TOO_LONG)
    message = str(caught.value)
    assert "\n" not in message and "--target cpu" in message
    vectors, script, left = (int(number) for number in re.findall(r"(\d+) (?:bytes for vectors|for its script|are left)", message))
    assert vectors >= 4 * TOO_LONG and vectors + script > left


def test_the_kernel_itself_would_have_refused_them(monkeypatch):
    monkeypatch.setattr(render, "check_worker_memory", lambda *asked: None)
    source = source_of(TOO_LONG)
    with pytest.raises(ToolchainError, match="too little shared memory"):
        toolchain.build(source)
