"""Incremental text: whole characters, spaces where they belong, nothing behind a stop string."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kogc.runtime.text import TextStream


def byte_tokenizer() -> Tokenizer:
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def word_tokenizer() -> Tokenizer:
    """Words with a leading ▁, and single bytes as fallback, decoded as Llama's tokenizer does."""
    words = ["<unk>", "▁Once", "▁upon", "▁a", "time"] + [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def stream_all(stream: TextStream, ids: list[int]) -> list[str]:
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stopped:
            return pieces
    return [*pieces, stream.rest()]


def test_characters_come_whole():
    tokenizer = byte_tokenizer()
    text = "naïve 日本 🙂 end"
    pieces = stream_all(TextStream(tokenizer), tokenizer.encode(text).ids)
    assert "".join(pieces) == text
    assert "🙂" in pieces and "\ufffd" not in "".join(pieces)


def test_an_unfinished_character_is_dropped():
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("ok 🙂").ids[:-1]
    assert "".join(stream_all(TextStream(tokenizer), ids)) == "ok "


def test_a_continuation_keeps_its_first_space():
    tokenizer = word_tokenizer()
    assert stream_all(TextStream(tokenizer, prompt=[1]), [2, 3]) == [" upon", " a", ""]
    assert stream_all(TextStream(tokenizer), [1, 2]) == ["Once", " upon", ""]


def test_a_prompt_may_end_inside_a_character():
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("a🙂b").ids
    assert "b" in "".join(stream_all(TextStream(tokenizer, prompt=ids[:3]), ids[3:]))


@pytest.mark.parametrize("make", [byte_tokenizer, word_tokenizer])
def test_any_ids_can_be_decoded(make):
    tokenizer = make()
    random.seed(1)
    for _ in range(100):
        ids = [random.randrange(tokenizer.get_vocab_size()) for _ in range(40)]
        text = "".join(stream_all(TextStream(tokenizer, ids[:5]), ids[5:]))
        assert text.isprintable() or text.encode()


def test_nothing_leaks_past_a_stop_string():
    tokenizer = byte_tokenizer()
    stream = TextStream(tokenizer, stops=["END", "\n\n"])
    pieces = stream_all(stream, tokenizer.encode("some\nENtext END more").ids)
    assert stream.stopped and "".join(pieces) == "some\nENtext "
    # the line end, "E" and "N" waited until it was clear that they begin no stop string
    assert pieces[4:8] == ["", "\n", "", "ENt"]


def test_held_text_is_given_out_at_the_end():
    tokenizer = byte_tokenizer()
    stream = TextStream(tokenizer, stops=["END"])
    pieces = stream_all(stream, tokenizer.encode("the EN").ids)
    assert pieces[-1] == "EN" and not stream.stopped and "".join(pieces) == "the EN"


def test_the_earliest_stop_string_wins():
    tokenizer = byte_tokenizer()
    stream = TextStream(tokenizer, stops=["bc", "abcd", "b"])
    assert "".join(stream_all(stream, tokenizer.encode("xxabcd").ids)) == "xxa"


def test_without_tokenizer_there_is_no_text():
    assert stream_all(TextStream(None, [1]), [2, 3]) == ["", "", ""]
