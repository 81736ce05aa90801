"""A one-agent run in this process: the agent samples for itself, a script scores, and credit is the real one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from lightning_mappa.algorithm.advantages import (
    ActionCredit,
    ActionRow,
    ActionStats,
    CreditSettings,
    credit,
)
from lightning_mappa.callbacks.weight_sync import WeightSync
from lightning_mappa.datamodules.rollout import RolloutDataModule
from lightning_mappa.errors import RunEnded
from lightning_mappa.models.load import load_trained_tensors
from lightning_mappa.module import AgentModule
from lightning_mappa.rollout.fingerprint import Fingerprint
from lightning_mappa.types import ActionKey, Experience, MaskReason

VOCAB = 24
LIKED = 5
PROMPT = (1, 2, 3)


def some_score(response_ids: Sequence[int]) -> float:
    """Differs between responses, so that every batch has something to learn from."""
    return float(sum(response_ids) % 11)


def share_of_liked(response_ids: Sequence[int]) -> float:
    """0…10: how much of a response is the one token that the script likes."""
    return 10.0 * sum(token == LIKED for token in response_ids) / len(response_ids)


class InProcessRun:
    """An `AgentLink` with its own copy of the policy as engine. Every call is noted in `calls`."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        max_steps: int = 3,
        first_step: int = 0,
        n_actions: int = 6,
        n_tokens: int = 5,
        score: Callable[[Sequence[int]], float | None] = share_of_liked,
        alter: Callable[[int, list[Experience]], list[Experience]] = lambda step, actions: actions,
        checkpoints: Mapping[int, Path] | None = None,
        success: Mapping[int, float] | None = None,
        last_step: int | None = None,
    ) -> None:
        self.agent_id = "solver"
        self.first_step = first_step
        self.max_steps = max_steps
        self.calls: list[tuple[str, int]] = []
        self.reports: dict[int, dict[str, float]] = {}
        self.pushed: dict[int, dict[str, Tensor]] = {}
        self.fingerprints: dict[int, Fingerprint] = {}
        self.left: list[BaseException | None] = []
        self._engine = copy.deepcopy(model).eval()
        self._n_actions, self._n_tokens = n_actions, n_tokens
        self._score, self._alter = score, alter
        self._checkpoints, self._success = checkpoints or {}, success or {}
        self._last_step = last_step
        self._rows: list[Experience] = []

    def experience(self, step: int) -> list[Experience]:
        self.calls.append(("experience", step))
        if self._last_step is not None and step > self._last_step:
            raise RunEnded("the run is over")
        self._rows = self._alter(step, self._sample(step))
        return self._rows

    def exchange(
        self, step: int, stats: Mapping[ActionKey, ActionStats], kl_coef: float
    ) -> Mapping[ActionKey, ActionCredit]:
        self.calls.append(("exchange", step))
        rows = []
        for e in self._rows:
            masked = e.masked or (MaskReason.INVALID if e.key not in stats else None)
            known = e.score is not None and masked is None
            rows.append(
                ActionRow(
                    key=e.key,
                    agent_id=e.agent_id,
                    turn=e.turn,
                    reward=e.score / 10.0 if known and e.score is not None else None,
                    masked=masked,
                    frozen=False,
                    kl_coef=kl_coef,
                    stats=stats.get(e.key, ActionStats(n_tokens=len(e.response_ids))),
                )
            )
        return credit(rows, CreditSettings())

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls.append(("report", step))
        self.reports[step] = dict(metrics)

    def push_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]], fingerprint: Fingerprint) -> None:
        self.calls.append(("push_weights", version))
        self.pushed[version] = {name: tensor.clone() for name, tensor in tensors}
        self.fingerprints[version] = fingerprint
        load_trained_tensors(self._engine, self.pushed[version])  # type: ignore[arg-type]

    def offer_weights(self, version: int) -> list[str]:
        return [f"engine of {version}"]

    def weights_sent(self, version: int, n_bytes: int, fingerprint: Fingerprint) -> None:
        self.calls.append((f"weights_sent, {n_bytes}", version))

    def evaluation(self, version: int) -> Mapping[str, float]:
        self.calls.append(("evaluation", version))
        return {"success": self._success.get(version, 0.5)}

    def checkpoint_path(self, version: int) -> Path | None:
        self.calls.append(("checkpoint_path", version))
        return self._checkpoints.get(version)

    def checkpoint_saved(self, version: int) -> None:
        self.calls.append(("checkpoint_saved", version))

    def leave(self, error: BaseException | None = None) -> None:
        self.left.append(error)

    @torch.no_grad()
    def _sample(self, step: int) -> list[Experience]:
        generator = torch.Generator().manual_seed(step)
        ids_BT = torch.tensor([PROMPT] * self._n_actions)
        log_probs_BT = torch.zeros(self._n_actions, 0)
        for _ in range(self._n_tokens):
            logits_BV = self._engine(input_ids=ids_BT).logits[:, -1].float()
            log_probs_BV = logits_BV.log_softmax(-1)
            token_B1 = torch.multinomial(log_probs_BV.exp(), 1, generator=generator)
            ids_BT = torch.cat([ids_BT, token_B1], dim=1)
            log_probs_BT = torch.cat([log_probs_BT, log_probs_BV.gather(1, token_B1)], dim=1)
        responses = [tuple(row[len(PROMPT) :]) for row in ids_BT.tolist()]
        return [
            Experience(
                key=(f"episode-{step}-{index}", 0),
                agent_id=self.agent_id,
                turn=0,
                prompt_ids=PROMPT,
                response_ids=response,
                rollout_log_probs=tuple(log_probs),
                score=self._score(response),
                policy_version=step,
            )
            for index, (response, log_probs) in enumerate(zip(responses, log_probs_BT.tolist(), strict=True))
        ]


def make_trainer(root: Path, **options: object) -> Trainer:
    """A quiet CPU Trainer for one run; `options` override."""
    defaults: dict[str, object] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "use_distributed_sampler": False,
        "default_root_dir": root,
    }
    return Trainer(**{**defaults, **options})  # type: ignore[arg-type]


def make_agent(model: PreTrainedModel | PeftModel, **options: Any) -> AgentModule:
    return AgentModule("solver", model, **{"lr": 1e-2, "max_steps": 3, **options})


def fit(
    root: Path,
    run: InProcessRun,
    module: AgentModule,
    *,
    callbacks: Sequence[Callback] = (),
    ckpt_path: Path | None = None,
    **options: object,
) -> Trainer:
    """Trains on the run, with WeightSync before the other callbacks; `options` are the Trainer's."""
    trainer = make_trainer(root, callbacks=[WeightSync(), *callbacks], **options)
    trainer.fit(module, datamodule=RolloutDataModule(run), ckpt_path=ckpt_path)
    return trainer
