"""Chat templates with the habits of well-known model families, on a character tokenizer."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import AddedToken, PreTrainedTokenizerFast

from lightning_mappa.models.char_tokenizer import CHAT_TEMPLATE, char_tokenizer


@dataclass(frozen=True)
class Family:
    template: str
    special: Sequence[str] = ()
    added: Sequence[str] = ()
    """One id each, and yet not special: they survive decoding."""
    end_of_turn: str = "<|im_end|>"
    tool_role: str = "user"
    first: str = ""
    """What [system S, user U] renders to, generation prompt included."""
    suffix: str = ""
    """What stands between a response cut at the limit and the next, for the tool result T."""

    def tokenizer(self) -> PreTrainedTokenizerFast:
        tokenizer = char_tokenizer()
        tokenizer.add_special_tokens({"additional_special_tokens": [*self.special]})
        tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in self.added])
        tokenizer.eos_token = self.end_of_turn
        tokenizer.chat_template = self.template
        return tokenizer


_CHATML_GENERATION = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

FAMILIES = {
    "char": Family(
        template=CHAT_TEMPLATE,
        end_of_turn="<|end|>",
        tool_role="tool",
        first="<|system|>S<|end|><|user|>U<|end|><|assistant|>",
        suffix="<|end|><|tool|>T<|end|><|assistant|>",
    ),
    # Any role goes, and a system prompt is put in where there is none (SmolLM2).
    "chatml": Family(
        template=(
            "{% for m in messages %}"
            "{% if loop.first and m.role != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}"
            "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + _CHATML_GENERATION
        ),
        special=("<|im_start|>", "<|im_end|>"),
        first="<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n",
        suffix="<|im_end|>\n<|im_start|>user\nT<|im_end|>\n<|im_start|>assistant\n",
    ),
    # Thinking is dropped from history, and tool results are wrapped (Qwen3).
    "strips_thinking": Family(
        template=(
            "{% for m in messages %}"
            "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response>"
            "{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
            "{{ m.content.split('</think>')[-1].lstrip('\n') }}"
            "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endif %}<|im_end|>\n"
            "{% endfor %}" + _CHATML_GENERATION
        ),
        special=("<|im_start|>", "<|im_end|>"),
        added=("<think>", "</think>", "<tool_response>", "</tool_response>"),
        tool_role="tool",
        first="<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n",
        suffix=(
            "<|im_end|>\n<|im_start|>user\n<tool_response>\nT\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        ),
    ),
    # The generation prompt opens the thinking, no next turn follows on a tool message (R1 distillates).
    "opens_thinking": Family(
        template=(
            "<|begin|>{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
            "{% elif m.role == 'user' %}<|User|>{{ m.content }}"
            "{% elif m.role == 'tool' %}<|tool_out|>{{ m.content }}"
            "{% else %}<|Assistant|>{{ m.content.split('</think>')[-1] }}<|eos|>{% endif %}{% endfor %}"
            "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|Assistant|><think>\n{% endif %}"
        ),
        special=("<|begin|>", "<|User|>", "<|Assistant|>", "<|tool_out|>", "<|eos|>"),
        added=("<think>", "</think>"),
        end_of_turn="<|eos|>",
        first="<|begin|>S<|User|>U<|Assistant|><think>\n",
        suffix="<|eos|><|User|>T<|Assistant|><think>\n",
    ),
    # Contents are trimmed, any role goes but tool has a name of its own (Llama 3).
    "headers": Family(
        template=(
            "<|begin_of_text|>{% for m in messages %}{% set role = 'ipython' if m.role == 'tool' else m.role %}"
            "<|start_header_id|>{{ role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
            "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
        ),
        special=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        end_of_turn="<|eot_id|>",
        tool_role="tool",
        first=(
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
        ),
        suffix=(
            "<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\nT<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
        ),
    ),
    # Roles must alternate, the system prompt goes into the last user message, no generation prompt (Mistral).
    "instructions": Family(
        template=(
            "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
            "{% set messages = messages[1:] %}{% endif %}<s>"
            "{% for m in messages %}"
            "{% if m.role != ['user', 'assistant'][loop.index0 % 2] %}{{ raise_exception('roles must alternate') }}"
            "{% elif m.role == 'user' %}"
            "[INST]{% if loop.last and system is defined %}{{ system }}\n\n{% endif %}{{ m.content }}[/INST]"
            "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
        ),
        special=("<s>", "</s>", "[INST]", "[/INST]"),
        end_of_turn="</s>",
        first="<s>[INST]S\n\nU[/INST]",
        suffix="</s>[INST]T[/INST]",
    ),
    # No system role, and a space before the end of the turn (Gemma, Llama 2).
    "no_system": Family(
        template=(
            "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}<bos>"
            "{% for m in messages %}"
            "{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('role') }}{% endif %}"
            "<turn>{{ m.role }}\n{{ m.content | trim }} <eot>\n{% endfor %}"
            "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
        ),
        special=("<bos>", "<turn>", "<eot>"),
        end_of_turn="<eot>",
        first="<bos><turn>user\nS\n\nU <eot>\n<turn>assistant\n",
        suffix=" <eot>\n<turn>user\nT <eot>\n<turn>assistant\n",
    ),
}
