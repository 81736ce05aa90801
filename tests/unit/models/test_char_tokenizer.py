from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from lightning_mappa.models.char_tokenizer import CHARACTERS, char_tokenizer

TOKENIZER = char_tokenizer()


@given(st.text(alphabet=CHARACTERS))
@settings(max_examples=100, deadline=None)
def test_text_survives_encoding_with_one_token_per_character(text):
    ids = TOKENIZER(text, split_special_tokens=True)["input_ids"]  # "<|end|>" is a token unless asked
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.decode([*ids, TOKENIZER.eos_token_id], skip_special_tokens=True) == text


def test_chat_template_writes_roles_and_ends():
    messages = [{"role": "user", "content": "1 + 1\n"}, {"role": "assistant", "content": "2"}]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>1 + 1\n<|end|><|assistant|>2<|end|><|assistant|>"
    ids = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert len(ids) == len("1 + 1\n2") + 5
    assert TOKENIZER.decode(ids) == text


def test_every_token_has_its_own_id():
    specials = ["<|pad|>", "<|unk|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"]
    assert TOKENIZER.convert_tokens_to_ids(specials) == list(range(7))
    assert len(TOKENIZER) == 7 + 1 + 95
    assert TOKENIZER("é")["input_ids"] == [TOKENIZER.unk_token_id]
    assert (TOKENIZER.pad_token, TOKENIZER.eos_token) == ("<|pad|>", "<|end|>")


@pytest.mark.parametrize("text", ["a  b .\n\n 'x' n't", "print(1 , 2) \\boxed{3}"])
def test_saved_tokenizer_is_the_same(tmp_path: Path, text):
    TOKENIZER.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(text)["input_ids"] == TOKENIZER(text)["input_ids"]
    assert again.decode(again(text)["input_ids"]) == text
    assert again.chat_template == TOKENIZER.chat_template
    assert (again.eos_token_id, again.pad_token_id) == (TOKENIZER.eos_token_id, TOKENIZER.pad_token_id)
