"""A tokenizer of whole words with the characters below them: for models that only know a few hundred words."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightning_mappa.models.char_tokenizer import CHARACTERS, CHAT_TEMPLATE, END, PAD, ROLES, UNK

PIECE = r" ?\w+| ?[^\w\s]+|\s"
"""A word or a run of signs, with the space before it; every other white space by itself."""


def words_of(texts: Iterable[str]) -> list[str]:
    """The distinct pieces of the texts, sorted: the same for the same texts in any order."""
    return sorted({piece for text in texts for piece in re.findall(PIECE, text)})


def word_tokenizer(words: Iterable[str], model_max_length: int = 2048) -> PreTrainedTokenizerFast:
    """One token for each of `words` (pieces as `words_of` cuts them), and seven special tokens.

    A piece that is none of them is spelt in characters: one token for each printable ASCII character and the newline;
    any other character becomes `<|unk|>`. Decoding gives text without such characters back exactly; `<|end|>` ends a
    turn. Special tokens come first, then the characters as in the character tokenizer, then the words in their order.
    """
    special = [PAD, UNK, *ROLES, END]
    tokens = dict.fromkeys([*special, *CHARACTERS, *words])
    vocabulary = {token: index for index, token in enumerate(tokens)}
    # Without merges a piece is its characters, unless it is in the vocabulary as a whole.
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNK, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        unk_token=UNK,
        eos_token=END,
        additional_special_tokens=list(ROLES),
        clean_up_tokenization_spaces=False,
        padding_side="right",
        model_max_length=model_max_length,
        chat_template=CHAT_TEMPLATE,
    )
