"""The gradient of an optimizer step: what is in it, and that it does not depend on how it is computed."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_mappa.testing import tiny_llama
from tests.unit.in_process import VOCAB, InProcessRun, fit, make_agent, some_score


def uneven(step, actions):
    """Responses of 1 … 5 tokens."""
    return [
        dataclasses.replace(e, response_ids=e.response_ids[:n], rollout_log_probs=e.rollout_log_probs[:n])
        for e, n in zip(actions, [5, 1, 3, 2, 4, 5], strict=True)
    ]


class Gradients(Callback):
    """Keeps the gradient of each optimizer step as one float64 vector."""

    def __init__(self) -> None:
        self.steps: list[torch.Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        parts = [p.grad.double().flatten() for p in pl_module.parameters() if p.grad is not None]
        self.steps.append(torch.cat(parts))


def gradients(tmp_path, model, *, alter=uneven, precision="32-true", **options):
    kept = Gradients()
    run = InProcessRun(model, max_steps=1, score=some_score, alter=alter)
    module = make_agent(model, grad_clip=0.0, max_steps=1, **options)
    fit(tmp_path, run, module, callbacks=[kept], precision=precision)
    return kept.steps


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_the_gradient_does_not_depend_on_the_micro_batches(tmp_path, mode):
    cuts = [
        gradients(tmp_path, tiny_llama(VOCAB, 0).double(), loss_agg_mode=mode, **size)
        for size in (
            {"micro_batch_size": 1},
            {"micro_batch_size": 4},
            {"micro_batch_tokens": 13},
            {"micro_batch_size": 6},
        )
    ]
    assert [len(steps) for steps in cuts] == [1, 1, 1, 1]
    whole = cuts[-1][0]
    assert whole.norm() > 1e-3
    for (gradient,) in cuts[:-1]:
        assert (gradient - whole).norm() / whole.norm() <= 1e-10


def test_recomputed_activations_give_the_same_gradient(tmp_path):
    (plain,) = gradients(tmp_path, tiny_llama(VOCAB, 0).double())
    (recomputed,) = gradients(tmp_path, tiny_llama(VOCAB, 0).double(), gradient_checkpointing=True)
    assert torch.allclose(plain, recomputed, rtol=0, atol=1e-12)


def test_gradient_checkpointing_recomputes_layers_in_the_gradient_pass_only(tmp_path):
    model = tiny_llama(VOCAB, 0)
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    run = InProcessRun(model, max_steps=1, score=some_score)
    calls.clear()
    fit(tmp_path, run, make_agent(model, max_steps=1, gradient_checkpointing=True))
    # old log-probs; the forward and its repetition; the fingerprint
    assert calls[-4:] == [False, True, True, False]


def test_mini_batches_step_the_optimizer_in_episode_order(tmp_path):
    steps = gradients(tmp_path, tiny_llama(VOCAB, 0), mini_batch_size=4)
    assert len(steps) == 2


def test_a_masked_action_has_no_part_in_the_gradient(tmp_path):
    def without(step, actions):
        return [actions[0], *actions[2:]]

    def unscored(step, actions):
        return [actions[0], dataclasses.replace(actions[1], score=None), *actions[2:]]

    (left_out,) = gradients(tmp_path, tiny_llama(VOCAB, 0).double(), alter=without)
    (masked,) = gradients(tmp_path, tiny_llama(VOCAB, 0).double(), alter=unscored)
    assert torch.allclose(left_out, masked, rtol=0, atol=1e-12)


def test_the_rollout_correction_weighs_by_the_engines_own_log_probs(tmp_path):
    def half_as_likely(step, actions):
        """What the engine says of its samples is 0.5 times what the trainer will say."""
        shift = torch.log(torch.tensor(0.5)).item()
        return [
            dataclasses.replace(e, rollout_log_probs=tuple(v + shift for v in e.rollout_log_probs)) for e in actions
        ]

    model = tiny_llama(VOCAB, 0).double()
    (plain,) = gradients(tmp_path, copy.deepcopy(model), alter=half_as_likely)
    (weighed,) = gradients(tmp_path, copy.deepcopy(model), alter=half_as_likely, rollout_correction=3.0)
    (capped,) = gradients(tmp_path, copy.deepcopy(model), alter=half_as_likely, rollout_correction=1.5)
    assert torch.allclose(weighed, 2.0 * plain, rtol=1e-5, atol=1e-6)
    assert torch.allclose(capped, 1.5 * plain, rtol=1e-5, atol=1e-6)
