"""Whole words where they are known, characters where they are not, and no text that fails."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mappa.models.char_tokenizer import CHARACTERS, char_tokenizer
from lightning_mappa.models.load import load_tokenizer
from lightning_mappa.models.word_tokenizer import word_tokenizer, words_of
from lightning_mappa.workflows.conversation import ChatFormat, Conversation

PROGRAM = 'out[["rent"]] = pd.DataFrame(model.predict(Z))\nout.to_csv("submission.csv", index=False)'
TOKENIZER = word_tokenizer(words_of([PROGRAM, "id rents"]))


def pieces(text):
    return TOKENIZER.convert_ids_to_tokens(TOKENIZER.encode(text))


def test_words_come_whole_and_others_as_characters():
    assert pieces('out[["rent"]]') == ["out", '[["', "rent", '"]]']
    assert pieces("rented") == list("rented")  # a word that begins like a known one
    assert pieces("grid id") == [*"grid", " ", "i", "d"]  # known is `id` without a space before it
    assert pieces("a rents") == ["a", " rents"]
    assert pieces("é\t") == ["<|unk|>", "<|unk|>"]
    assert words_of(["b a", "a b"]) == [" a", " b", "a", "b"]


@settings(deadline=None, max_examples=200)
@given(st.text())
def test_any_text_is_encoded_and_what_is_ascii_comes_back(text):
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert all(0 <= token < len(TOKENIZER) for token in ids)
    if set(text) <= set(CHARACTERS):
        assert TOKENIZER.decode(ids) == text


@pytest.mark.parametrize("text", [PROGRAM, "", "\n\n  x", "a" * 3000])
def test_decoding_gives_the_text_back(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_it_is_the_same_after_saving(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    again = load_tokenizer(str(tmp_path))
    assert again.get_vocab() == TOKENIZER.get_vocab()
    assert again.encode(PROGRAM + " unknown") == TOKENIZER.encode(PROGRAM + " unknown")
    assert again.chat_template == char_tokenizer().chat_template


def test_a_conversation_grows_as_the_template_writes_it():
    chat = ChatFormat(TOKENIZER)
    conversation = Conversation(chat, system="", user="Predict rent")
    assert TOKENIZER.decode(conversation.prompt_ids) == "<|user|>Predict rent<|end|><|assistant|>"
    assert chat.tool_role == "tool"
    assert "<|end|>" not in chat.decode([*TOKENIZER.encode(PROGRAM), TOKENIZER.eos_token_id])
