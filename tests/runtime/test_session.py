"""Conversations: only new tokens are processed, and the answer is that of the whole text."""

import pytest

from kogc.errors import BadInput, ContextOverflow

pytestmark = pytest.mark.compiler


def test_turns_continue_where_the_last_one_ended(engine, expected):
    with engine.session() as session:
        first = engine.generate([3, 4], max_tokens=5, session=session)
        answer = [token.id for token in first]
        assert session.ids == [3, 4, *answer] and session.pending == answer[-1:]
        second = engine.generate([7, 8], max_tokens=5, session=session)
        assert second.prompt_ids == [answer[-1], 7, 8]
        assert [token.id for token in second] == expected([3, 4, *answer, 7, 8], 5)


def test_sessions_do_not_see_each_other(engine, expected):
    one, other = engine.session(), engine.session()
    list(engine.generate([3], max_tokens=2, session=one))
    list(engine.generate([5], max_tokens=2, session=other))
    assert list(engine.generate([9], max_tokens=4)) is not None
    whole = [*one.ids, 6]
    assert [token.id for token in engine.generate([6], max_tokens=4, session=one)] == expected(whole, 4)


def test_a_cancelled_turn_counts_what_was_read(engine, expected):
    session = engine.session()
    generation = engine.generate([52], max_tokens=40, session=session)
    read = [next(generation).id, next(generation).id]
    generation.close()
    assert session.ids == [52, *read]
    assert [token.id for token in engine.generate([1], max_tokens=3, session=session)] == expected([52, *read, 1], 3)


def test_reset_starts_over(engine, expected):
    session = engine.session()
    list(engine.generate([3], max_tokens=5, session=session))
    session.reset()
    assert [token.id for token in engine.generate([4], max_tokens=5, session=session)] == expected([4], 5)


def test_rewinding_keeps_what_lies_before(engine, expected):
    with engine.session() as session:
        list(engine.generate([3, 4, 5], max_tokens=6, session=session))
        session.rewind(2)
        assert session.ids == [3, 4] and session.cached == 2
        assert [token.id for token in engine.generate([9], max_tokens=4, session=session)] == expected([3, 4, 9], 4)
        for length in (-1, 8):
            with pytest.raises(BadInput, match=f"has 7 tokens, so it cannot go back to {length}"):
                session.rewind(length)


def test_a_session_serves_one_generation_at_a_time(engine):
    session = engine.session()
    generation = engine.generate([52], session=session)
    with pytest.raises(BadInput, match="another generation is using this session"):
        engine.generate([1], session=session)
    with pytest.raises(BadInput, match="another generation"):
        session.reset()
    generation.close()
    with pytest.raises(BadInput, match="outside the vocabulary"):
        engine.generate([99], session=session)
    assert list(engine.generate([1], max_tokens=1, session=session))


def test_overflow_counts_the_session(engine):
    session = engine.session()
    list(engine.generate([2] * 40, max_tokens=2, session=session))
    with pytest.raises(ContextOverflow, match=r"9 tokens after the 41 already in the session do not fit into the context of 48"):
        engine.generate([2] * 8, session=session)
    assert list(engine.generate([2], max_tokens=1, session=session))


def test_a_closed_session_says_so(engine):
    session = engine.session()
    session.close()
    with pytest.raises(BadInput, match="session is closed"):
        engine.generate([1], session=session)


def test_closing_a_session_cancels_its_generation(engine):
    session = engine.session()
    generation = engine.generate([53], session=session, stall_timeout=60)
    session.close()
    assert list(generation) == [] and generation.finish_reason == "cancelled"


def test_a_session_of_another_engine_is_refused(engine):
    """Its caches may be smaller than the kernel thinks."""
    with engine.artifact.engine() as other, pytest.raises(BadInput, match="belongs to another engine"):
        engine.generate([1], session=other.session())


def test_logits_follow_the_conversation_and_leave_it_as_it_was(engine, expected):
    session = engine.session()
    list(engine.generate([3, 4], max_tokens=5, session=session))
    said, cached = list(session.ids), session.cached
    logits = engine.logits([7, 8, 9], session=session)
    assert logits.argmax(1).tolist() == [expected([*said, 7, 8, 9][: len(said) + t + 1], 1)[0] for t in range(3)]
    assert (session.ids, session.cached) == (said, cached)
    assert [token.id for token in engine.generate([6], max_tokens=4, session=session)] == expected([*said, 6], 4)
    with pytest.raises(ContextOverflow, match="45 tokens after the 12 already in the session"):
        engine.logits([1] * 45, session=session)
    with pytest.raises(BadInput, match="another engine"):
        engine.logits([1], session=object())
