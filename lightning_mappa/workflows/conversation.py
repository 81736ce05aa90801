"""One agent's multi-turn context, exact to the token.

What an agent sampled stays in its context as it was sampled. Its ids are never decoded and encoded again,
so the context of every later turn begins with exactly what was generated from and generated before.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from itertools import takewhile

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from lightning_mappa.errors import ConfigError
from lightning_mappa.thinking import THINK

ChatMessage = dict[str, str]
_PROBE = "bb21f3c0"
_BRACKETED = re.compile(r"<.+>|\[.+\]", re.DOTALL)


class ControlTokens:
    """The tokens of a tokenizer that steer a model, which nobody but the chat template may write."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        tokens = _control_tokens(tokenizer)
        self.ids = {tokenizer.convert_tokens_to_ids(token) for token in tokens}
        self._pattern = re.compile("|".join(map(re.escape, tokens)) or r"(?!)")

    def plain(self, text: str) -> str:
        """`text` with a space inside every control token, so that it is read as text and steers nothing."""
        while self._pattern.search(text):
            text = self._pattern.sub(lambda match: f"{match[0][:1]} {match[0][1:]}", text)
        return text


class ChatFormat:
    """A tokenizer's own chat template, taken apart into the pieces a growing context is made of.

    `tool_role` is the role tool results come in. None takes `tool` where the template tells it from `user`,
    and `user` elsewhere. Where the template has no system role, the system prompt opens the user's message.
    Raises `ConfigError` for a tokenizer without chat template or whose template refuses the role.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, tool_role: str | None = None) -> None:
        if not tokenizer.chat_template:
            raise ConfigError("model.path: the tokenizer has no chat template; give a chat model or add one")
        self._tokenizer = tokenizer
        self._controls = ControlTokens(tokenizer)
        self._control_ids = self._controls.ids
        self._has_system = self._renders(_message("system", _PROBE), _message("user", "question"))
        self.tool_role = tool_role or ("tool" if self._tells_tool_from_user() else "user")
        self.opens_thinking = self._render([_message("user", "question")]).rstrip().endswith(THINK)
        """The generation prompt opens the thinking, so a response begins inside it."""
        if _PROBE not in self._suffix([_message("user", "question")], _message(self.tool_role, _PROBE)):
            raise ConfigError(f"model.path: the chat template writes no messages of role {self.tool_role}")

    def opening(self, system: str, user: str) -> list[ChatMessage]:
        """The messages of a first turn. Control tokens in `user` are broken up; `system` is left as it is."""
        user = self.plain(user)
        if not system:
            return [_message("user", user)]
        if not self._has_system:
            return [_message("user", f"{system}\n\n{user}")]
        return [_message("system", system), _message("user", user)]

    def opening_ids(self, opening: Sequence[ChatMessage]) -> tuple[int, ...]:
        return self._encode(self._render(opening))

    def suffix_ids(
        self, opening: Sequence[ChatMessage], response_ids: Sequence[int], role: str, content: str
    ) -> tuple[int, ...]:
        """What stands between a response and the next: end of turn, the message, generation prompt.

        The end of turn is left out when it was sampled, as the last of `response_ids`.
        """
        suffix = self._encode(self._suffix(opening, _message(role, self.plain(content))))
        lead = len(list(takewhile(lambda token: token not in self._control_ids, suffix)))
        if response_ids and lead < len(suffix) and suffix[lead] == response_ids[-1]:
            return suffix[lead + 1 :]
        return suffix

    def decode(self, response_ids: Sequence[int]) -> str:
        """The text of a response, special tokens left out and otherwise unchanged."""
        text = self._tokenizer.decode(list(response_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def plain(self, text: str) -> str:
        """See `ControlTokens.plain`."""
        return self._controls.plain(text)

    def _render(self, messages: Sequence[ChatMessage], generation_prompt: bool = True) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=generation_prompt
            )
        except (TemplateError, TypeError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(f"model.path: the chat template refuses the roles {roles}: {error}") from error
        assert isinstance(text, str)
        return text

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _suffix(self, opening: Sequence[ChatMessage], message: ChatMessage, generation_prompt: bool = True) -> str:
        """What the template writes after an assistant's content, found behind a mark put in its place."""
        mark = hashlib.sha256(message["content"].encode()).hexdigest()  # cannot occur in the content itself
        rendered = self._render([*opening, _message("assistant", mark), message], generation_prompt)
        if rendered.count(mark) != 1:
            raise ConfigError("model.path: the chat template does not write an assistant's content as it is")
        suffix = rendered.partition(mark)[2]
        system = opening[0]["content"].strip() if opening[0]["role"] == "system" else ""
        if system and system in suffix and system not in message["content"]:
            # Some templates put the system prompt into the last user message; here it has been said already.
            return self._suffix(opening[1:], message, generation_prompt)
        return suffix

    def _renders(self, *messages: ChatMessage) -> bool:
        try:
            return _PROBE in self._render(messages)
        except ConfigError:
            return False

    def _tells_tool_from_user(self) -> bool:
        """Whether role `tool` is written, is not just any name to the template, and leads to a next turn."""
        opening = [_message("user", "question")]
        if not self._renders(*opening, _message("assistant", "call"), _message("tool", _PROBE)):
            return False
        tool, user = _message("tool", _PROBE), _message("user", _PROBE)
        if self._suffix(opening, tool) == self._suffix(opening, user):
            return False
        named = re.search(r"""["']tool["']""", str(self._tokenizer.get_chat_template())) is not None
        return (named or self._control_sequence(tool) != self._control_sequence(user)) and (
            self._generation_prompt(tool) == self._generation_prompt(user)
        )

    def _control_sequence(self, message: ChatMessage) -> list[int]:
        suffix = self._encode(self._suffix([_message("user", "question")], message))
        return [token for token in suffix if token in self._control_ids]

    def _generation_prompt(self, message: ChatMessage) -> str:
        opening = [_message("user", "question")]
        closed = self._suffix(opening, message, generation_prompt=False)
        return self._suffix(opening, message).removeprefix(closed)


class Conversation:
    """The context of one agent in one episode. `prompt_ids` is what the next response is generated from."""

    def __init__(self, chat: ChatFormat, *, system: str, user: str) -> None:
        self._chat = chat
        self._opening = chat.opening(system, user)
        self.prompt_ids: tuple[int, ...] = chat.opening_ids(self._opening)

    def extend(self, response_ids: Sequence[int], *, role: str, content: str) -> None:
        """Appends a response exactly as sampled, and the message that answers it."""
        suffix = self._chat.suffix_ids(self._opening, response_ids, role, content)
        self.prompt_ids = (*self.prompt_ids, *response_ids, *suffix)


def _message(role: str, content: str) -> ChatMessage:
    return {"role": role, "content": content}


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Special tokens, and added ones in brackets (thinking, tool calls), longest first.

    Other added tokens are ordinary text in one piece, such as runs of spaces.
    """
    added = tokenizer.added_tokens_decoder.values()
    tokens = {str(token) for token in added if token.special or _BRACKETED.fullmatch(str(token))}
    return sorted(tokens | set(tokenizer.all_special_tokens), key=lambda token: (-len(token), token))
