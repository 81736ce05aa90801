"""The update of an agent in two roles is that of the same samples in one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mappa.algorithm.advantages import ActionCredit, ActionStats, CreditSettings
from lightning_mappa.rollout.ledger import Ledger, RewardSettings
from lightning_mappa.testing import tiny_llama
from lightning_mappa.types import ActionKey, Experience, ScoredEpisode
from tests.unit.factories import make_action, make_scored
from tests.unit.in_process import VOCAB, InProcessRun, fit, make_agent
from tests.unit.test_module_gradient import Gradients

PROMPTS = {"solver": (1, 2, 3), "verifier": (6, 5, 4, 3, 2)}
SCORES = ((7.0, 2.0), (1.0, 9.0), (4.0, 6.0), (8.0, 3.0))


class LedgerRun(InProcessRun):
    """Hands out what the books of the run hold of one agent, and the credit that they form."""

    def __init__(self, model: torch.nn.Module, books: Ledger) -> None:
        super().__init__(model, max_steps=1)
        self._books = books

    def experience(self, step: int) -> list[Experience]:
        return self._books.experiences(step, self.agent_id)

    def exchange(
        self, step: int, stats: Mapping[ActionKey, ActionStats], kl_coef: float
    ) -> Mapping[ActionKey, ActionCredit]:
        self._books.post(step, self.agent_id, stats, kl_coef)
        return self._books.credits_of(step, self.agent_id)


def episodes() -> list[ScoredEpisode]:
    """A verifier that acts with the solver's weights: another prompt, and shorter answers."""
    generator = torch.Generator().manual_seed(0)
    return [
        make_scored(
            f"e{number}",
            [
                make_action(
                    episode_id=f"e{number}",
                    index=index,
                    agent_id=role,
                    weights="solver",
                    prompt_ids=PROMPTS[role],
                    response_ids=torch.randint(4, VOCAB, (5 - index - number % 2,), generator=generator).tolist(),
                )
                for index, role in enumerate(PROMPTS)
            ],
            scores,
        )
        for number, scores in enumerate(SCORES)
    ]


def in_one_role(scored: ScoredEpisode) -> ScoredEpisode:
    """The same samples, as two turns of an agent that nobody shares."""
    actions = [
        dataclasses.replace(action, agent_id="solver", weights=None, turn=index)
        for index, action in enumerate(scored.episode.actions)
    ]
    return dataclasses.replace(scored, episode=dataclasses.replace(scored.episode, actions=tuple(actions)))


def gradient(folder: Path, of: Sequence[ScoredEpisode], **settings: Any) -> tuple[Tensor, dict[str, float]]:
    books = Ledger({"solver": True}, CreditSettings(**settings), RewardSettings())
    books.open_step(0, of)
    model, kept = tiny_llama(VOCAB, 0).double(), Gradients()
    run = LedgerRun(model, books)
    fit(folder, run, make_agent(model, grad_clip=0.0, max_steps=1, mini_batch_size=64), callbacks=[kept])
    (only,) = kept.steps
    return only, run.reports[0]


def by_hand() -> Tensor:
    """Of − (1/N) · sum of A · log p over the N sampled tokens, where a ratio of 1 is not clipped."""
    model = tiny_llama(VOCAB, 0).double()
    rewards = torch.tensor(SCORES, dtype=torch.float64).flatten() / 10
    advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-8)
    loss, n_tokens = torch.zeros((), dtype=torch.float64), 0
    actions = [action for scored in episodes() for action in scored.episode.actions]
    for action, advantage in zip(actions, advantages, strict=True):
        ids = torch.tensor([[*action.prompt_ids, *action.response_ids]])
        log_probs = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
        loss = loss - advantage * log_probs[len(action.prompt_ids) - 1 :].sum()
        n_tokens += len(action.response_ids)
    (loss / n_tokens).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("scope", ["action", "agent", "trajectory"])
def test_the_gradient_is_that_of_the_same_samples_in_one_role(tmp_path: Path, scope: str):
    shared, _ = gradient(tmp_path / "shared", episodes(), return_scope=scope)
    single, _ = gradient(tmp_path / "single", [in_one_role(one) for one in episodes()], return_scope=scope)
    assert single.norm() > 1e-3
    assert apart(shared, single) <= 1e-10


def test_the_gradient_is_the_one_worked_out_by_hand(tmp_path: Path):
    shared, _ = gradient(tmp_path, episodes())
    assert apart(shared, by_hand()) <= 1e-10


def test_behaviour_is_reported_by_role_and_training_by_agent(tmp_path: Path):
    """Scores of the solver 7 1 4 8, of the verifier 2 9 6 3; responses of 5 4 5 4 and 4 3 4 3 tokens."""
    _, report = gradient(tmp_path, episodes())
    assert (report["solver/score_mean"], report["verifier/score_mean"]) == (5.0, 5.0)
    assert (report["solver/response_length"], report["verifier/response_length"]) == (4.5, 3.5)
    assert report["verifier/truncation_rate"] == report["verifier/missing_verdict_rate"] == 0.0
    assert not {"score_mean", "response_length", "truncation_rate", "missing_verdict_rate"} & report.keys()
    assert (report["trained_actions"], report["tokens"]) == (8.0, 32.0)
    assert {"lr", "kl", "pg_loss", "grad_norm", "advantage_std", "masked_rate"} <= report.keys()
    _, single = gradient(tmp_path / "single", [in_one_role(one) for one in episodes()])
    assert (single["score_mean"], single["response_length"]) == (5.0, 4.0)
