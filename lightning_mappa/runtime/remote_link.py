"""An agent's line to a run that is in another process: calls go out through a queue, answers come back."""

from __future__ import annotations

import itertools
import queue
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_mappa.algorithm.advantages import ActionCredit, ActionStats
from lightning_mappa.errors import InfrastructureError, MappaError
from lightning_mappa.rollout.fingerprint import Fingerprint
from lightning_mappa.runtime.weight_sender import WeightSender, send_straight
from lightning_mappa.runtime.weight_transport import StoredWeights
from lightning_mappa.types import ActionKey, Experience


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A method of `BoardLink` that a Trainer wants called."""

    number: int
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The last thing that comes from a Trainer."""

    error: BaseException | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """To the call of that number: what it returned, or what it raised."""

    number: int
    value: Any = None
    error: BaseException | None = None


def portable(error: BaseException) -> BaseException:
    """The error as another process can hold it: ours as they are, any other with its traceback as text."""
    if isinstance(error, MappaError):
        return type(error)(str(error))
    trace = "".join(traceback.format_exception(error))
    return RuntimeError(f"{type(error).__name__}: {error}\n\nIn the Trainer's process:\n{trace}")


class RemoteLink:
    """An `AgentLink` in the process of a Trainer; `runtime.relay` is its other end.

    The Trainer's thread is the only one that calls it.

    Args:
        timeout_s: longest wait for an answer.
        sender: takes weights straight to the engines; None sends them through the object store.
    """

    def __init__(
        self, agent_id: str, *, first_step: int, max_steps: int, timeout_s: float, sender: WeightSender | None = None
    ) -> None:
        self.agent_id = agent_id
        self.first_step = first_step
        self.max_steps = max_steps
        self.timeout_s = timeout_s
        self._sender = sender
        self._numbers = itertools.count()
        self._outgoing: queue.SimpleQueue[Call | Ended] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()

    # -- the Trainer's side -----------------------------------------------------------------------------

    def experience(self, step: int) -> Sequence[Experience]:
        return self._ask("experience", step)

    def exchange(
        self, step: int, stats: Mapping[ActionKey, ActionStats], kl_coef: float
    ) -> Mapping[ActionKey, ActionCredit]:
        return self._ask("exchange", step, dict(stats), kl_coef)

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        self._ask("report", step, dict(metrics))

    def push_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]], fingerprint: Fingerprint) -> None:
        """Only the way to the tensors is sent: they stay in the object store until an engine fetches them."""
        if self._sender is None:
            self._ask("push_stored", version, StoredWeights.store(tensors), fingerprint)
        else:
            send_straight(self, self._sender, version, tensors, fingerprint)

    def offer_weights(self, version: int) -> Sequence[Any]:
        engines: Sequence[Any] = self._ask("offer_weights", version)
        return engines

    def weights_sent(self, version: int, n_bytes: int, fingerprint: Fingerprint) -> None:
        self._ask("weights_sent", version, n_bytes, fingerprint)

    def evaluation(self, version: int) -> Mapping[str, float]:
        return self._ask("evaluation", version)

    def checkpoint_path(self, version: int) -> Path | None:
        return self._ask("checkpoint_path", version)

    def checkpoint_saved(self, version: int) -> None:
        self._ask("checkpoint_saved", version)

    def leave(self, error: BaseException | None = None) -> None:
        self._ask("leave", None if error is None else portable(error))

    def _ask(self, method: str, *arguments: Any) -> Any:
        call = Call(number=next(self._numbers), method=method, arguments=arguments)
        self._outgoing.put(call)
        try:
            answer = self._answers.get(timeout=self.timeout_s)
        except queue.Empty:
            raise InfrastructureError(
                f"{self.agent_id} waited more than {self.timeout_s:g} s for the run to answer {method}"
            ) from None
        if answer.number != call.number:
            raise InfrastructureError(f"{self.agent_id} was answered call {answer.number} and not {call.number}")
        if answer.error is not None:
            raise answer.error
        return answer.value

    # -- the other end's side ---------------------------------------------------------------------------

    def next_event(self, timeout_s: float) -> Call | Ended | None:
        """What the Trainer wants next; None when it wants nothing within the time."""
        try:
            return self._outgoing.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def answer(self, answer: Answer) -> None:
        self._answers.put(answer)

    def end(self, error: BaseException | None) -> None:
        """The Trainer has ended; to be called once."""
        self._outgoing.put(Ended(error=None if error is None else portable(error)))
