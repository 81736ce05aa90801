"""Weights that go straight from the ranks that train them to the engines that serve them, past the run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from lightning_mappa.rollout.fingerprint import Fingerprint


@runtime_checkable
class WholeWeights(Protocol):
    """An agent's trained tensors, put together one at a time; every reading is a fresh pass in the same order."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of every tensor of a pass, in its order; known without putting anything together."""
        ...

    def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...


class WeightSender(Protocol):
    def send(self, tensors: WholeWeights, engines: Sequence[Any]) -> int:
        """Returns the bytes sent, once every engine has them. Every rank of the agent calls it alike.

        Args:
            engines: actors of the agent's engines on rank 0, nothing on the others.

        Raises `InfrastructureError` when an engine does not take them.
        """
        ...


class Receiver(Protocol):
    """The run, as far as a sender needs it; see `AgentLink`."""

    def offer_weights(self, version: int) -> Sequence[Any]: ...

    def weights_sent(self, version: int, n_bytes: int, fingerprint: Fingerprint) -> None: ...


def send_straight(
    run: Receiver,
    sender: WeightSender,
    version: int,
    tensors: Iterable[tuple[str, Tensor]],
    fingerprint: Fingerprint,
) -> None:
    """`AgentLink.push_weights` where the tensors do not pass through the run."""
    if not isinstance(tensors, WholeWeights):
        raise TypeError(f"weights that go straight to engines need their shapes beforehand; got {type(tensors)}")
    engines = run.offer_weights(version)
    run.weights_sent(version, sender.send(tensors, engines), fingerprint)
