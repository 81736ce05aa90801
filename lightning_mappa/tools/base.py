"""What a tool is to a workflow."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from lightning_mappa.types import ToolCall, ToolResult


class Tool(Protocol):
    """Finds its calls in an agent's text and runs them. Stateless: what persists lies in the workspace."""

    name: str

    def parse(self, text: str) -> list[ToolCall]:
        """The calls in `text` in order, those inside thinking left out; empty when there are none."""
        ...

    async def run(self, call: ToolCall, workspace: Path) -> ToolResult:
        """Runs one call. Never raises for what the program did, never blocks the event loop.

        The result is shown to agents and coach as it is: a tool cuts its own long output (`head_and_tail`).
        """
        ...
