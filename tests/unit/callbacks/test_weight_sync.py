import pytest
import torch

from lightning_mappa.callbacks.weight_sync import WeightSync
from lightning_mappa.errors import ConfigError
from lightning_mappa.models.load import add_adapter, trained_tensors
from lightning_mappa.module import AgentModule
from lightning_mappa.testing import tiny_llama
from tests.unit.in_process import VOCAB, InProcessRun, fit, make_agent, make_trainer, some_score


def test_every_step_is_pushed_once_after_its_report_and_before_the_next_experience(tmp_path):
    model = tiny_llama(VOCAB, 0)
    run = InProcessRun(model, max_steps=2, score=some_score)
    fit(tmp_path, run, make_agent(model, max_steps=run.max_steps))
    assert run.calls == [
        ("checkpoint_path", 0),
        ("experience", 0),
        ("exchange", 0),
        ("report", 0),
        ("push_weights", 1),
        ("checkpoint_path", 1),
        ("experience", 1),
        ("exchange", 1),
        ("report", 1),
        ("push_weights", 2),
    ]


def test_what_is_pushed_are_the_weights_of_that_version(tmp_path):
    model = tiny_llama(VOCAB, 0).to(torch.bfloat16)
    run = InProcessRun(model, max_steps=2, score=some_score)
    fit(tmp_path, run, make_agent(model, max_steps=run.max_steps))
    final = trained_tensors(model)
    assert run.pushed[2].keys() == final.keys()
    for name, tensor in run.pushed[2].items():
        assert torch.equal(tensor, final[name])
    assert any(not torch.equal(run.pushed[1][name], final[name]) for name in final)


def test_with_an_adapter_only_the_adapter_is_pushed(tmp_path):
    model = add_adapter(
        tiny_llama(VOCAB, 0), r=2, alpha=4, dropout=0.0, target_modules=["q_proj"], seed=0, name="solver"
    )
    run = InProcessRun(model, max_steps=1, score=some_score)
    fit(tmp_path, run, make_agent(model, max_steps=run.max_steps))
    assert len(run.pushed[1]) == 4  # A and B in two layers
    assert all("lora_" in name for name in run.pushed[1])


class TakesNoWeights(InProcessRun):
    push_weights = property()  # reading it is an AttributeError


def test_a_run_that_takes_no_weights_is_refused(tmp_path):
    model = tiny_llama(VOCAB, 0)
    with pytest.raises(ConfigError, match="WeightSync needs a run that takes weights"):
        fit(tmp_path, TakesNoWeights(model), make_agent(model))


def test_a_trainer_without_a_run_is_refused(tmp_path):
    module = AgentModule("solver", tiny_llama(VOCAB, 0))
    with pytest.raises(ConfigError, match="must be a RolloutDataModule; given: NoneType"):
        make_trainer(tmp_path, callbacks=[WeightSync()]).fit(module, train_dataloaders=[1])
