"""A run that goes on from a checkpoint, against the one that was never stopped."""

from __future__ import annotations

import pytest
import torch

from lightning_mappa.callbacks.kl_penalty import KLPenalty
from lightning_mappa.errors import DataError
from lightning_mappa.models.load import add_adapter
from lightning_mappa.testing import tiny_llama
from tests.unit.in_process import VOCAB, InProcessRun, fit, make_agent, some_score

LORA = {"r": 4, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear"}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def run_to(lora, **options):
    model = tiny_llama(VOCAB, 0) if lora is None else add_adapter(tiny_llama(VOCAB, 0), seed=0, **lora)
    return InProcessRun(model, max_steps=4, score=some_score, **options), model


def adaptive():
    return KLPenalty(kl_coef=0.1, kind="adaptive", kl_target=0.01, kl_horizon=100)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("val_check_interval", [1, 2, 4])
def test_a_resumed_run_ends_with_the_same_bytes(tmp_path, lora, val_check_interval):
    saved = tmp_path / "solver.ckpt"
    options = {
        "limit_val_batches": 1,
        "val_check_interval": val_check_interval,
        "check_val_every_n_epoch": None,
    }
    run, model = run_to(lora, checkpoints={2: saved})
    whole = make_agent(model, max_steps=4, mini_batch_size=4)
    fit(tmp_path, run, whole, callbacks=[adaptive()], **options)
    assert run.calls.index(("checkpoint_saved", 2)) < run.calls.index(("experience", 2))

    resumed, model = run_to(lora, first_step=2)
    resumed.push_weights(2, run.pushed[2].items(), run.fingerprints[2])
    later = make_agent(model, max_steps=4, mini_batch_size=4)
    fit(tmp_path, resumed, later, callbacks=[adaptive()], ckpt_path=saved, **options)
    assert same(run.pushed[3], resumed.pushed[3])
    assert same(run.pushed[4], resumed.pushed[4])
    assert run.reports[2] == resumed.reports[2]
    assert run.reports[3] == resumed.reports[3]
    evaluated = [v for call, v in run.calls if call == "evaluation" and v > 2]
    assert [v for call, v in resumed.calls if call == "evaluation"] == evaluated


def test_a_checkpoint_of_an_adapter_leaves_the_base_out(tmp_path):
    saved = tmp_path / "solver.ckpt"
    run, model = run_to(LORA, checkpoints={1: saved})
    fit(tmp_path, run, make_agent(model, max_steps=4), callbacks=[KLPenalty()])
    checkpoint = torch.load(saved, weights_only=True)
    assert all(".lora_" in name for name in checkpoint["state_dict"])

    name, _ = checkpoint["state_dict"].popitem()
    torch.save(checkpoint, saved)
    resumed, model = run_to(LORA, first_step=1)
    with pytest.raises(DataError, match=f"lacks 1 trained tensors, such as {name}"):
        fit(tmp_path, resumed, make_agent(model, max_steps=4), callbacks=[KLPenalty()], ckpt_path=saved)
