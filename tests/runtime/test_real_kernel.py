"""The engine on a generated kernel: what the hand-written one cannot show."""

import numpy as np
import pytest

from kogc.errors import KernelStalled
from kogc.runtime.job import Fault

pytestmark = [pytest.mark.compiler, pytest.mark.slow, pytest.mark.zig]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    from kogc.compiler import compile as compile_model

    path = tmp_path_factory.mktemp("real") / "tiny.kog"
    return compile_model("preset:llama-tiny", target="cpu", output=path, random_weights=True, workers=3, gate=False)


@pytest.fixture(scope="module")
def engine(artifact):
    with artifact.engine() as engine:
        yield engine


def ids_of(generation):
    return [token.id for token in generation]


def test_generation_follows_the_logits(engine):
    prompt = [5, 9, 2, 40, 7]
    made = ids_of(engine.generate(prompt, max_tokens=12))
    logits = engine.logits(prompt + made)
    assert logits.argmax(1)[len(prompt) - 1 : -1].tolist() == made
    again = engine.logits(prompt + made)
    assert np.array_equal(logits.view(np.uint32), again.view(np.uint32))


@pytest.mark.parametrize("first", [1, 3, 4, 5, 9])
def test_turns_of_a_session_equal_the_whole_text(engine, first):
    prompt = list(range(3, 3 + first))
    with engine.session() as session:
        answer = ids_of(engine.generate(prompt, max_tokens=6, session=session))
        cut = engine.generate([11, 12], max_tokens=30, session=session)
        read = [next(cut).id, next(cut).id]
        cut.close()
        last = ids_of(engine.generate([13], max_tokens=6, session=session))
    whole = prompt + answer + [11, 12] + read + [13]
    assert last == ids_of(engine.generate(whole, max_tokens=6))


def test_a_cancelled_run_leaves_nothing_behind(engine):
    expected = ids_of(engine.generate([5, 6, 7], max_tokens=10))
    for count in range(4):
        generation = engine.generate([9] * (3 * count + 1), max_tokens=40)
        for _ in range(count):
            next(generation)
        generation.close()
        assert ids_of(engine.generate([5, 6, 7], max_tokens=10)) == expected


def test_a_stuck_worker_is_named(artifact):
    stages = artifact.manifest.stages
    for worker in range(3):
        with artifact.engine(stall_timeout=0.5, fault=Fault(kind=3, stage=1, worker=worker)) as engine:
            with pytest.raises(KernelStalled) as caught:
                ids_of(engine.generate([1, 2], max_tokens=5))
            assert caught.value.peer == worker and caught.value.stage in stages
