"""An agent's thinking: it stays in the agent's own context and is shown to no one else."""

from __future__ import annotations

import re

THINK = "<think>"
_THINKING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL | re.IGNORECASE)
_UP_TO_END = re.compile(r"\A.*</think>", re.DOTALL | re.IGNORECASE)


def strip_thinking(text: str) -> str:
    """Leaves out `<think>…</think>`, an unclosed `<think>…`, and everything before a `</think>` that the chat
    template opened in the prompt."""
    return _UP_TO_END.sub("", _THINKING.sub("", text))
