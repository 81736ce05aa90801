"""One agent's line to the run, shared by the ranks that train it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from lightning_mappa.algorithm.advantages import ActionCredit, ActionStats
from lightning_mappa.errors import InfrastructureError, MappaError, RankLost
from lightning_mappa.rollout.fingerprint import Fingerprint
from lightning_mappa.runtime.base import AgentLink
from lightning_mappa.runtime.weight_sender import WeightSender, send_straight
from lightning_mappa.types import ActionKey, Experience

T = TypeVar("T")


class RankLink:
    """An `AgentLink` for every rank: rank 0 asks the run, and what comes of it, an error too, goes to all.

    Every rank has to make the same calls in the same order. They meet over gloo, on CUDA too: a wait for the
    run is not a wait on a device, and may take as long as the run's deadline.

    Args:
        link: the run's own; on rank 0 only.
        agent_id: as the link has it, like the next two.
        timeout_s: longest wait of the other ranks for rank 0: more than the longest wait of the link.
        sender: takes weights straight to the engines; None pushes them through rank 0's link.
    """

    def __init__(
        self,
        link: AgentLink | None,
        *,
        rank: int,
        agent_id: str,
        first_step: int,
        max_steps: int,
        timeout_s: float,
        sender: WeightSender | None = None,
    ) -> None:
        if (link is None) != (rank > 0):
            raise ValueError("rank 0 alone has the run's own link")
        self.agent_id = agent_id
        self.first_step = first_step
        self.max_steps = max_steps
        self._link = link
        self._sender = sender
        self._timeout = timedelta(seconds=timeout_s)
        self._group: Any = None

    def experience(self, step: int) -> Sequence[Experience]:
        return self._ask(lambda link: link.experience(step))

    def exchange(
        self, step: int, stats: Mapping[ActionKey, ActionStats], kl_coef: float
    ) -> Mapping[ActionKey, ActionCredit]:
        return self._ask(lambda link: dict(link.exchange(step, stats, kl_coef)))

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        self._ask(lambda link: link.report(step, metrics))

    def push_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]], fingerprint: Fingerprint) -> None:
        """The tensors come out of collectives, so every rank reads all of them, whatever rank 0 meets with."""
        if self._sender is not None:
            send_straight(self, self._sender, version, tensors, fingerprint)
            return
        stream = iter(tensors)

        def push(link: AgentLink) -> None:
            try:
                link.push_weights(version, stream, fingerprint)
            finally:
                deque(stream, maxlen=0)

        if self._link is None:
            deque(stream, maxlen=0)
        self._ask(push)

    def offer_weights(self, version: int) -> Sequence[Any]:
        """The engines' actors on rank 0, which alone talks to them; nothing on the others."""
        engines: list[Any] = []
        self._ask(lambda link: engines.extend(link.offer_weights(version)))
        return engines

    def weights_sent(self, version: int, n_bytes: int, fingerprint: Fingerprint) -> None:
        self._ask(lambda link: link.weights_sent(version, n_bytes, fingerprint))

    def evaluation(self, version: int) -> Mapping[str, float]:
        return self._ask(lambda link: dict(link.evaluation(version)))

    def checkpoint_path(self, version: int) -> Path | None:
        return self._ask(lambda link: link.checkpoint_path(version))

    def checkpoint_saved(self, version: int) -> None:
        self._ask(lambda link: link.checkpoint_saved(version))

    def leave(self, error: BaseException | None = None) -> None:
        """Not shared: a rank that breaks off does so alone, and the others meet with it in their next collective."""
        if self._link is not None:
            self._link.leave(error)

    def _ask(self, call: Callable[[AgentLink], T]) -> T:
        answer: T | None = None
        error: Exception | None = None
        if self._link is not None:
            try:
                answer = call(self._link)
            except Exception as caught:
                error = caught
        # Of other classes nobody knows whether they can be sent.
        told = error if error is None or isinstance(error, MappaError) else InfrastructureError(_line(error))
        shared: list[Any] = [answer, told]
        try:
            dist.broadcast_object_list(shared, src=0, group=self._control())
        except RuntimeError as broken:
            raise RankLost(f"agent {self.agent_id}: its ranks lost each other: {_line(broken)}") from error
        if error is not None:
            raise error
        answer, told = shared
        if told is not None:
            raise told
        return answer

    def _control(self) -> Any:
        """Made in the first call, because there is no process group before the Trainer has one."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        return self._group


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
