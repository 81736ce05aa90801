"""What a Trainer sees of the run around it; `runtime=local` and `runtime=ray` both provide this."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from lightning_mappa.algorithm.advantages import ActionCredit, ActionStats
from lightning_mappa.rollout.fingerprint import Fingerprint
from lightning_mappa.types import ActionKey, Experience

if TYPE_CHECKING:
    from lightning_mappa.agents import AgentFacts
    from lightning_mappa.rollout.engine import Engine
    from lightning_mappa.run_folder import RunFolder
    from lightning_mappa.runtime.board import Board, Turns


class Place(Protocol):
    """Where the parts of a run that hold weights are: engine and Trainers."""

    @property
    def facts(self) -> Mapping[str, AgentFacts]:
        """Of every agent, in the order of the config."""
        ...

    @property
    def engine(self) -> Engine: ...

    @property
    def turns(self) -> Turns: ...

    @property
    def stages_weights(self) -> bool:
        """Whether pushed weights wait for `ServedWeights.serve` at staleness 0 as well; see `ServedWeights`."""
        ...

    def prepare(self) -> None:
        """Builds every Trainer's parts. Raises `ConfigError` for what they refuse."""
        ...

    def train(self, board: Board, folder: RunFolder, checkpoint: Path | None, drive: Callable[[], None]) -> None:
        """Runs the Trainers and, in this thread, `drive`, until all have ended. Raises the first error of any."""
        ...

    def usage(self) -> Mapping[str, Any]:
        """What the run has needed: `peak_rss_gib` by process, `weight_sync_bytes` of the last sync by agent."""
        ...

    def close(self) -> None:
        """Ends what was started. Closing twice is fine."""
        ...


class AgentLink(Protocol):
    """One agent's line to the run. Every call may wait for other agents; none waits without a deadline.

    Per rollout step, in this order: `checkpoint_path` (and `checkpoint_saved` where there is one), `experience`,
    `exchange`, `report`, `push_weights`, and `evaluation` where the Trainer validates. A resumed run pushes
    the restored weights before its first step.
    """

    agent_id: str
    first_step: int
    """0, or the step a resumed run goes on with."""
    max_steps: int

    def experience(self, step: int) -> Sequence[Experience]:
        """This agent's scored actions of rollout step `step`; empty when it took none.

        Raises `RunEnded` when no such step will come.
        """
        ...

    def exchange(
        self, step: int, stats: Mapping[ActionKey, ActionStats], kl_coef: float
    ) -> Mapping[ActionKey, ActionCredit]:
        """Posts KL sums of this agent's actions and returns their credit, once every agent has posted."""
        ...

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """What this agent has to say of its update in step `step`."""
        ...

    def push_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]], fingerprint: Fingerprint) -> None:
        """Puts this agent's trained tensors of policy `version` (= completed steps) into the engine.

        `tensors` is read once, in order, and each is copied before the next is asked for. Raises
        `InfrastructureError` when what the engine then serves has another `fingerprint`.
        """
        ...

    def offer_weights(self, version: int) -> Sequence[Any]:
        """Has the agent's engines make room for tensors that come to them straight from the ranks.

        Returns their actors. Part of a `push_weights` by a `WeightSender`, like `weights_sent`.
        """
        ...

    def weights_sent(self, version: int, n_bytes: int, fingerprint: Fingerprint) -> None:
        """Says that the engines have them. Raises `InfrastructureError` when they serve another `fingerprint`."""
        ...

    def evaluation(self, version: int) -> Mapping[str, float]:
        """The system's evaluation on the selection split at `version`: computed once, the same to every agent."""
        ...

    def checkpoint_path(self, version: int) -> Path | None:
        """The file to save this agent's Trainer checkpoint to before step `version`; None when none is due."""
        ...

    def checkpoint_saved(self, version: int) -> None:
        """Says that the file is complete, and waits until the joint checkpoint of all agents is visible."""
        ...

    def leave(self, error: BaseException | None = None) -> None:
        """Ends this agent's part, and the run for all after the current step. Idempotent."""
        ...
