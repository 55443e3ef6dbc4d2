"""An engine over its life: more workers than cores, cancelled and continued generations, every way to end."""

from __future__ import annotations

import re

import pytest
from against_torch import assert_close, assert_equal_bits, assert_greedy, compile_quickly, generated, random_ids, random_model, torch_logits

from kogc.compile_passes import plan
from kogc.dump import Dump
from kogc.errors import ContextOverflow, KernelStalled
from kogc.frontend.load import load_model
from kogc.targets import load_target

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

CONTEXT, VOCAB = 64, 101
CONFIG = {
    "model_type": "laneformer", "num_lanes": 4, "hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 8, "intermediate_size": 96, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "broadcast_delay": 2, "use_early_comm": True,
    "lm_head_type": "replicate", "sliding_window": 11, "swa_layers": [0, 2],
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 40,
    "vocab_size": 53, "max_position_embeddings": 32,
}  # fmt: skip
PROMPT = random_ids(VOCAB, 7)


@pytest.fixture(scope="module")
def module():
    return random_model(CONFIG, CONTEXT, seed=3)


@pytest.fixture(scope="module")
def artifact(module, tmp_path_factory):
    """Eight workers: more than this machine is likely to have cores, and two for every lane."""
    return compile_quickly(module, tmp_path_factory.mktemp("crowd"), workers=8)


@pytest.fixture(scope="module")
def engine(artifact):
    with artifact.engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(engine):
    """The whole text after ``PROMPT``, up to the end of the context."""
    return generated(engine, PROMPT, CONTEXT)


def test_more_workers_than_cores_finish_and_are_right(module, engine, expected):
    ids = random_ids(VOCAB, CONTEXT, seed=1)
    logits = engine.logits(ids)
    assert_close(logits, torch_logits(module, ids), "fp32")
    for _ in range(3):
        assert_equal_bits(engine.logits(ids), logits)
        assert generated(engine, PROMPT, CONTEXT) == expected
    text = PROMPT + expected
    assert_greedy(expected, torch_logits(module, text[:-1])[len(PROMPT) - 1 :], "fp32")
    assert len(set(expected)) > 5, "these weights show nothing"


@pytest.mark.parametrize("read", [0, 1, 5, 20])
def test_a_cancelled_generation_leaves_a_usable_engine(engine, expected, read):
    generation = engine.generate(PROMPT[::-1], max_tokens=CONTEXT)
    for _ in range(read):
        next(generation)
    generation.close()
    assert generation.finish_reason == "cancelled" and len(generation.ids) == read
    assert generated(engine, PROMPT, CONTEXT) == expected


def test_an_aborted_generation_leaves_a_usable_engine(engine, expected):
    """A limit no wait can keep."""
    with pytest.raises(KernelStalled):
        generated(engine, PROMPT, CONTEXT, stall_timeout=1e-9)
    assert generated(engine, PROMPT, CONTEXT) == expected


def test_a_session_continues_like_the_concatenated_text(engine):
    """Turns whose lengths leave every remainder of a step, after answers that were read to the end or not."""
    with engine.session() as session:
        text: list[int] = []
        for turn, length in enumerate((5, 1, 3, 4, 2)):
            prompt = random_ids(VOCAB, length, seed=10 + turn)
            fresh = generated(engine, text + prompt, 4)
            generation = engine.generate(prompt, max_tokens=4, session=session)
            assert [token.id for token in generation] == fresh
            text += prompt + fresh
        assert session.ids == text


def ended(engine, ids, **options):
    generation = engine.generate(ids, **options)
    return [token.id for token in generation], generation.finish_reason


def test_max_tokens_end_it(engine, expected):
    for count in (1, 2, 9):
        assert ended(engine, PROMPT, max_tokens=count) == (expected[:count], "length")


def test_a_stop_id_ends_it_and_is_kept(engine, expected):
    token = expected[6]
    until = expected.index(token) + 1
    assert ended(engine, PROMPT, max_tokens=CONTEXT, stop=token) == (expected[:until], "stop")
    never = next(id for id in range(VOCAB) if id not in expected)
    assert ended(engine, PROMPT, max_tokens=CONTEXT, stop=[never, token]) == (expected[:until], "stop")


def test_the_context_ends_it(module, engine, expected):
    """The last position's token is still made; one more would need a position that does not exist."""
    assert ended(engine, PROMPT, max_tokens=CONTEXT) == (expected, "context")
    assert len(expected) == CONTEXT - len(PROMPT) + 1
    full = random_ids(VOCAB, CONTEXT)
    tokens, reason = ended(engine, full, max_tokens=5)
    assert reason == "context" and len(tokens) == 1
    assert_greedy(tokens, torch_logits(module, full)[-1:], "fp32")
    with pytest.raises(ContextOverflow):
        engine.generate([*full, 1], max_tokens=1)


def source_of(config) -> str:
    """The kernel's text with every number replaced by one sign."""
    model = load_model(random_model(config, 32))
    planned = plan(model, "fp32", 2, load_target("cpu"), Dump(None), lambda *progress: None)
    return re.sub(r"\d+", "#", planned.rendered.source)


@pytest.mark.parametrize("config, few, many", [(LLAMA, 4, 32), ({**CONFIG, "swa_layers": []}, 6, 18)], ids=["llama", "laneformer"])
def test_32_layers_emit_the_code_of_few(config, few, many):
    """Delayed lanes differ from layer to layer only in their first δ layers and at the end."""
    short, long = (source_of({**config, "num_hidden_layers": layers}) for layers in (few, many))
    assert len(long) == len(short)
    assert long == short
