"""A character tokenizer with a chat template: the tiny model's, small enough to read."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

PAD, UNK, END = "<|pad|>", "<|unk|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def char_tokenizer(model_max_length: int = 2048) -> PreTrainedTokenizerFast:
    """One token for each printable ASCII character and the newline, and seven special tokens.

    Special tokens come first (`<|pad|>` is 0), then the characters in code order. Any other character
    becomes `<|unk|>`. Decoding gives text back exactly; `<|end|>` ends a turn.
    """
    special = [PAD, UNK, *ROLES, END]
    vocabulary = {token: index for index, token in enumerate([*special, *CHARACTERS])}
    # Byte-pair encoding without merges is one token per character, and needs no pre-tokenizer.
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNK))
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
