"""Finds the python in an agent's text.

A block opens with a line of three or more backticks and `python` or `py` (any case, anything after it), and closes
with a line of at least as many backticks and nothing else. Both may be indented; the opening's indentation is taken
off the code. A fence of another language is skipped with all it holds; a fence that never closes counts as no
block, because its program may be cut in half.
"""

from __future__ import annotations

import re

from lightning_mappa.thinking import strip_thinking

_OPENING = re.compile(r"(?P<indent>[ \t]*)(?P<fence>`{3,})[ \t]*(?P<language>[^\s`{]*)[^`]*")
_LANGUAGES = frozenset({"python", "py"})


def code_blocks(text: str) -> list[str]:
    """The fenced python blocks outside thinking, in order, with `\\n` line ends; blank ones are left out."""
    blocks: list[str] = []
    fence, indent, is_python, body = "", 0, False, [""]
    for line in strip_thinking(text).replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        if not fence:
            if opening := _OPENING.fullmatch(line):
                fence, indent, body = opening["fence"], len(opening["indent"]), []
                is_python = opening["language"].lower() in _LANGUAGES
        elif _closes(line, fence):
            code = "\n".join(body)
            if is_python and code.strip():
                blocks.append(code + "\n")
            fence = ""
        else:
            body.append(line[:indent].lstrip(" \t") + line[indent:])
    return blocks


def _closes(line: str, fence: str) -> bool:
    stripped = line.strip()
    return len(stripped) >= len(fence) and not stripped.strip("`")
