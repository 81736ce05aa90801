import math

import pytest
import torch
from lightning.pytorch import Callback

from lightning_mappa.callbacks.kl_penalty import KLPenalty
from lightning_mappa.errors import ConfigError, NotAvailableError, NumericError
from lightning_mappa.models.load import add_adapter, trained_tensors
from lightning_mappa.testing import tiny_llama
from tests.unit.in_process import VOCAB, InProcessRun, fit, make_agent, some_score


def make_model(lora):
    model = tiny_llama(VOCAB, 0)
    if not lora:
        return model
    return add_adapter(model, r=4, alpha=8, dropout=0.0, target_modules="all-linear", seed=0)


class References(Callback):
    """The reference log-probs of each step, and the weights around their forward."""

    def __init__(self):
        self.log_probs = {}
        self.weights_seen = {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.log_probs[batch.step] = batch.ref_log_probs_BT.clone()
        self.weights_seen[batch.step] = {n: t.clone() for n, t in trained_tensors(pl_module.model).items()}


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_kl_is_0_at_step_0_and_the_policy_gets_its_own_weights_back(tmp_path, lora):
    model = make_model(lora)
    run = InProcessRun(model, score=some_score)
    kept = References()
    fit(tmp_path, run, make_agent(model), callbacks=[KLPenalty(), kept])
    assert run.reports[0]["kl"] == 0.0
    assert abs(run.reports[1]["kl"]) > 1e-4
    for step in (1, 2):
        seen = kept.weights_seen[step]
        assert all(torch.equal(seen[name], tensor) for name, tensor in run.pushed[step].items())


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_after_a_resume_the_reference_is_still_the_policy_at_step_0(tmp_path, lora):
    saved = tmp_path / "solver.ckpt"
    model = make_model(lora)
    run = InProcessRun(model, score=some_score, checkpoints={2: saved})
    whole = References()
    fit(tmp_path, run, make_agent(model), callbacks=[KLPenalty(), whole])

    model = make_model(lora)
    resumed = InProcessRun(model, score=some_score, first_step=2)
    resumed.push_weights(2, run.pushed[2].items(), run.fingerprints[2])
    later = References()
    fit(tmp_path, resumed, make_agent(model), callbacks=[KLPenalty(), later], ckpt_path=saved)
    assert torch.equal(whole.log_probs[2], later.log_probs[2])
    assert run.reports[2]["kl"] == resumed.reports[2]["kl"] != 0.0


def test_the_reference_is_in_no_checkpoint_and_no_module(tmp_path):
    saved = tmp_path / "solver.ckpt"
    model = make_model(lora=False)
    run = InProcessRun(model, score=some_score, checkpoints={1: saved})
    module = make_agent(model)
    fit(tmp_path, run, module, callbacks=[KLPenalty()])
    checkpoint = torch.load(saved, weights_only=True)
    assert checkpoint["state_dict"].keys() == module.state_dict().keys()
    assert checkpoint["callbacks"]["KLPenalty"] == {"coef": 0.01}


def test_the_penalty_is_in_the_return(tmp_path):
    """One action per step alone in its scope would be constant: compare two with equal scores but unequal KL."""
    model = make_model(lora=False)
    advantages = {}

    class Keep(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            kl_B = (batch.old_log_probs_BT - batch.ref_log_probs_BT).double().sum(1)
            reward_B = torch.tensor([e.score / 10 for e in batch], dtype=torch.float64)
            return_B = reward_B - batch.kl_coef * kl_B
            wanted_B = (return_B - return_B.mean()) / (return_B.std(correction=0) + 1e-8)
            advantages[batch.step] = (wanted_B, batch.advantages_BT[:, -1].double())

    run = InProcessRun(model, score=some_score)
    fit(tmp_path, run, make_agent(model), callbacks=[KLPenalty(kl_coef=0.5), Keep()])
    for wanted_B, got_B in advantages.values():
        assert torch.allclose(wanted_B, got_B, atol=1e-6)


def test_the_adaptive_coefficient_follows_the_measured_kl(tmp_path):
    model = make_model(lora=False)
    run = InProcessRun(model, score=some_score)
    callback = KLPenalty(kl_coef=0.1, kind="adaptive", kl_target=0.01, kl_horizon=12)
    fit(tmp_path, run, make_agent(model), callbacks=[callback])
    coefs = [run.reports[step]["kl_coef"] for step in range(3)]
    for step in range(2):
        error = min(max(run.reports[step]["kl"] / 0.01 - 1, -0.2), 0.2)
        assert coefs[step + 1] == pytest.approx(coefs[step] * (1 + error * 6 / 12))
    assert coefs[0] == 0.1
    assert coefs[1] == pytest.approx(0.09)  # at step 0 the KL is 0, far below its target


def test_a_runaway_kl_ends_the_run_only_where_asked(tmp_path):
    model = make_model(lora=False)
    run = InProcessRun(model, score=some_score)
    with pytest.raises(NumericError, match=r"agent solver: KL to the reference is .* in step 1, above max_kl=1e-06"):
        fit(tmp_path, run, make_agent(model), callbacks=[KLPenalty(max_kl=1e-6)])
    assert not KLPenalty().is_runaway(math.inf)
    assert KLPenalty(max_kl=1.0).is_runaway(math.nan)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kl_coef": -1.0}, ConfigError, "kl_coef"),
        ({"kind": "linear"}, ConfigError, "fixed, adaptive"),
        ({"kind": "adaptive"}, ConfigError, "needs kl_target and kl_horizon"),
        ({"kl_target": 1.0}, ConfigError, "for kind=adaptive"),
        ({"estimator": "k3"}, ConfigError, "k3"),
        ({"estimator": "k1", "placement": "loss"}, ConfigError, "gradient is zero"),
        ({"estimator": "k2", "placement": "loss"}, NotAvailableError, "not available"),
    ],
)
def test_what_is_not_allowed_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        KLPenalty(**options)
