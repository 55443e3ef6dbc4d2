"""Generation on a hand-written kernel: tokens, ends, errors, and that nothing is left running."""

import gc
import threading
import time

import numpy as np
import pytest

from kogc.errors import BadInput, ContextOverflow, EnvironmentFailure, KernelStalled, NumericError

pytestmark = pytest.mark.compiler

STALL, NAN_LOGITS, SLOW, STUCK, SILENT, NO_THREADS = range(50, 56)
CONTEXT, VOCAB, EOS = 48, 64, 63


def kernels() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "kogc-kernel"]


def test_tokens_ids_and_stats(engine, expected):
    generation = engine.generate([3, 4], max_tokens=8)
    tokens = list(generation)
    assert [token.id for token in tokens] == generation.ids == expected([3, 4], 8)
    assert generation.finish_reason == "length"
    assert generation.prompt_ids == [3, 4]
    assert generation.stats.prompt_tokens == 2 and generation.stats.tokens == 8
    assert 0 < generation.stats.prompt_s < generation.stats.ttft_s < 5 and generation.stats.decode_tok_s > 0
    assert generation.text == "" and not kernels()


def test_a_second_run_starts_with_an_empty_context(engine, expected):
    runs = [[token.id for token in engine.generate([1, 2, 3], max_tokens=6)] for _ in range(3)]
    assert runs == [expected([1, 2, 3], 6)] * 3


def test_numpy_ids_are_ids(engine, expected):
    assert [token.id for token in engine.generate(np.array([3, 4]), max_tokens=4)] == expected([3, 4], 4)


def test_eos_and_stop_ids_end_it(engine, expected):
    # 1 + 62 = EOS, at once
    generation = engine.generate([1, 62], max_tokens=8)
    assert [token.id for token in generation] == [EOS] and generation.finish_reason == "stop"
    ids = expected([3, 4], 8)
    generation = engine.generate([3, 4], max_tokens=8, stop=ids[2])
    assert [token.id for token in generation] == ids[:3] and generation.finish_reason == "stop"


def test_eos_can_be_ignored(engine, expected):
    generation = engine.generate([1, 62], max_tokens=3, ignore_eos=True)
    assert [token.id for token in generation] == [63, 62, 60] and generation.finish_reason == "length"
    assert [token.id for token in engine.generate([1, 62], max_tokens=3, stop=62, ignore_eos=True)] == [63, 62]


def test_the_context_ends_it(engine, expected):
    generation = engine.generate([2] * (CONTEXT - 2), max_tokens=100)
    assert [token.id for token in generation] == expected([2] * (CONTEXT - 2), 3)
    assert generation.finish_reason == "context"


def test_one_token_still_follows_a_full_context(engine):
    generation = engine.generate([2] * CONTEXT, max_tokens=1)
    assert len(list(generation)) == 1 and generation.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ([1, 64], "token 1 of the prompt is 64, outside the vocabulary of 64"),
        ([-1], "-1, outside"),
        ([1.5], "1.5, not an integer"),
        ([True], "not an integer"),
        ("text", "no tokenizer"),
    ],
)
def test_bad_prompts(engine, prompt, message):
    with pytest.raises(BadInput, match=message) as caught:
        engine.generate(prompt)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


def test_bad_options(engine):
    for options, message in (
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"stop": 64}, "neither text nor an id below 64"),
        ({"stop": "x"}, "no tokenizer"),
        ({"stop": [""]}, "stop string is empty"),
        ({"stall_timeout": 0}, "positive"),
    ):
        with pytest.raises(BadInput, match=message):
            engine.generate([1], **options)


def test_context_overflow_names_the_numbers(engine):
    with pytest.raises(ContextOverflow, match="49 tokens do not fit into the context of 48"):
        engine.generate([1] * 49)
    with pytest.raises(ContextOverflow):
        engine.logits([1] * 49)


def test_an_empty_prompt_becomes_the_start_token(make_artifact, expected):
    with make_artifact(bos_id=5).engine() as engine:
        assert [token.id for token in engine.generate([], max_tokens=3)] == expected([5], 3)


def test_logits_are_teacher_forced(engine):
    logits = engine.logits([1, 2, 3, 40, 41])
    assert logits.shape == (5, VOCAB) and logits.dtype == np.float32
    assert logits.argmax(1).tolist() == [1, 3, 6, 46, 23]


def test_probe_needs_a_probe_engine(fake, engine):
    with pytest.raises(BadInput, match="probe=True"):
        engine.probe([1])
    with fake.engine(probe=True) as probing:
        assert probing.probe([1, 9]).tolist() == [9, 10, 11, 12]


def test_a_stall_names_stage_and_workers(engine):
    with pytest.raises(KernelStalled, match=r"stage layers_attn \(iteration 2, step 3\): worker 0 waited for 1 s for worker 1") as caught:
        list(engine.generate([STALL]))
    error = caught.value
    assert (error.stage, error.iteration, error.worker, error.peer, error.step) == ("layers_attn", 2, 0, 1, 3)
    assert (error.expected, error.seen, error.exit_code) == (7, 6, 1)
    assert not kernels()


def test_a_stuck_worker_ends_after_the_timeout(engine, expected):
    before = time.monotonic()
    with pytest.raises(KernelStalled):
        list(engine.generate([STUCK], stall_timeout=0.1))
    assert time.monotonic() - before < 2
    # and leaves nothing behind
    assert [token.id for token in engine.generate([3], max_tokens=3)] == expected([3], 3)


def test_fault_injection_reaches_the_kernel(fake):
    from kogc.runtime.job import Fault

    with fake.engine(stall_timeout=0.1, fault=Fault(kind=3, stage=0, worker=1)) as engine, pytest.raises(KernelStalled):
        engine.logits([1])


def test_a_kernel_that_leaves_without_a_word(engine):
    with pytest.raises(KernelStalled, match="without saying why"):
        list(engine.generate([SILENT]))


def test_nan_logits_name_position_and_step(engine):
    with pytest.raises(NumericError, match=r"position 5 \(step 1\) hold a NaN, found by stage sample"):
        list(engine.generate([NAN_LOGITS] * 6))
    with pytest.raises(NumericError):
        engine.logits([NAN_LOGITS])


def test_a_kernel_that_cannot_run(engine):
    with pytest.raises(EnvironmentFailure, match="too few threads"):
        list(engine.generate([NO_THREADS]))
    with pytest.raises(EnvironmentFailure, match="too few threads"):
        engine.logits([NO_THREADS])


def test_close_cancels_a_running_kernel(engine):
    generation = engine.generate([SLOW], max_tokens=40)
    next(generation)
    generation.close()
    assert generation.finish_reason == "cancelled" and not kernels()
    assert list(generation) == []


def test_leaving_the_block_by_an_error_cancels(engine):
    with pytest.raises(ZeroDivisionError), engine.generate([STUCK, SLOW], stall_timeout=60) as generation:
        assert kernels() and generation.finish_reason is None
        1 / 0  # noqa: B018
    assert generation.finish_reason == "cancelled" and not kernels()


def test_a_forgotten_generation_is_cancelled(engine):
    engine.generate([STUCK], stall_timeout=60)
    gc.collect()
    assert not kernels()


def test_closing_the_engine_cancels(fake):
    engine = fake.engine()
    generation = engine.generate([STUCK], stall_timeout=60)
    engine.close()
    assert not kernels() and list(generation) == [] and generation.finish_reason == "cancelled"
    with pytest.raises(BadInput, match="closed"):
        engine.generate([1])
    with pytest.raises(BadInput, match="closed"):
        engine.logits([1])


def test_a_paused_reader_holds_nobody_up(engine, expected):
    first = engine.generate([3, 4], max_tokens=8)
    assert next(first).id == expected([3, 4], 1)[0]
    assert [token.id for token in engine.generate([9], max_tokens=5)] == expected([9], 5)
    assert [token.id for token in first] == expected([3, 4], 8)[1:]


def test_a_second_generation_waits_for_the_first(engine, expected):
    first = engine.generate([SLOW], max_tokens=10)
    started = threading.Event()
    result: list[list[int]] = []

    def other():
        started.set()
        result.append([token.id for token in engine.generate([9], max_tokens=5)])

    thread = threading.Thread(target=other)
    thread.start()
    started.wait()
    assert [token.id for token in first] == expected([SLOW], 10)
    thread.join(10)
    assert result == [expected([9], 5)]


def test_many_threads_share_one_engine(engine, expected):
    wrong: list[int] = []

    def client(number: int):
        for _ in range(10):
            if [token.id for token in engine.generate([number, 2], max_tokens=7)] != expected([number, 2], 7):
                wrong.append(number)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_a_generation_keeps_its_engine(fake, expected):
    assert [token.id for token in fake.engine().generate([SLOW], max_tokens=4)] == expected([SLOW], 4)
