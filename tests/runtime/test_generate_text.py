"""Prompts and answers as text, on the hand-written kernel."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from kogc import SamplingParams

pytestmark = pytest.mark.compiler

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 "


@pytest.fixture(scope="session")
def letters(make_artifact):
    """An artifact whose token n is letter n, token 63 is the end."""
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(LETTERS)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("</s>")])
    return make_artifact(tokenizer=tokenizer.to_str())


def spelled(ids):
    return "".join(LETTERS[i] for i in ids if i < len(LETTERS))


def test_text_in_text_out(letters, expected):
    with letters.engine() as engine:
        generation = engine.generate("cat", max_tokens=10)
        texts = [token.text for token in generation]
    ids = [LETTERS.index(letter) for letter in "cat"]
    assert generation.prompt_ids == ids
    assert "".join(texts) == generation.text == spelled(expected(ids, 10))
    assert all(texts)


def test_the_end_token_has_no_text(letters):
    with letters.engine() as engine:
        generation = engine.generate("b ", max_tokens=10)  # 1 + 62
        assert [(token.id, token.text) for token in generation] == [(63, "")]
    assert generation.finish_reason == "stop"


def test_a_stop_string_among_the_parameters(letters, expected):
    whole = spelled(expected([2, 0, 19], 10))
    with letters.engine() as engine:
        generation = engine.generate("cat", sampling=SamplingParams(max_tokens=10, stop=whole[4:6]))
        assert "".join(token.text for token in generation) == whole[:4] and generation.finish_reason == "stop"


def test_a_stop_string_cuts_text_and_kernel(letters, expected):
    whole = spelled(expected([2, 0, 19], 10))
    with letters.engine() as engine:
        generation = engine.generate("cat", max_tokens=10, stop=[whole[4:6], "none of this"])
        tokens = list(generation)
    assert generation.text == whole[:4] and generation.finish_reason == "stop"
    assert [token.id for token in tokens] == generation.ids == expected([2, 0, 19], 6)


def test_held_back_text_comes_with_the_last_token(letters, expected):
    whole = spelled(expected([2, 0, 19], 5))
    with letters.engine() as engine:
        generation = engine.generate("cat", max_tokens=5, stop=whole[3:] + "never")
        tokens = list(generation)
    assert generation.text == whole and generation.finish_reason == "length"
    assert len(tokens) == 5 and tokens[-1].text.endswith(whole[-1])


def test_a_second_turn_gets_no_second_start_token(letters, make_artifact):
    tokenizer = Tokenizer.from_str(letters.member_text("tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="z $A", special_tokens=[("z", 25)])
    artifact = make_artifact(tokenizer=tokenizer.to_str())
    with artifact.engine() as engine, engine.session() as session:
        first = engine.generate("a", max_tokens=1, session=session)
        assert first.prompt_ids == [25, 0]
        answer = next(first).id
        list(first)
        assert engine.generate("b", max_tokens=1, session=session).prompt_ids == [answer, 1]


def test_a_damaged_tokenizer_is_named(make_artifact):
    from kogc.errors import ArtifactError

    with pytest.raises(ArtifactError, match="section tokenizer.json cannot be read"):
        _ = make_artifact(tokenizer="{}").tokenizer
