import dataclasses

import pytest
import torch

from lightning_mappa.datamodules.rollout import RolloutDataModule, validated
from lightning_mappa.errors import DataError
from lightning_mappa.models.load import trained_tensors
from lightning_mappa.module import AgentModule
from lightning_mappa.testing import tiny_llama
from lightning_mappa.types import MaskReason
from tests.unit.factories import make_experience
from tests.unit.in_process import VOCAB, InProcessRun, fit, make_agent, make_trainer, some_score


def play(tmp_path, run, **options):
    return fit(tmp_path, run, make_agent(tiny_llama(VOCAB, 0), max_steps=run.max_steps), **options)


GOOD = make_experience()
FAULTS = {
    "another agent": {"agent_id": "verifier"},
    "lengths differ": {"rollout_log_probs": (-0.5,)},
    "empty prompt": {"prompt_ids": ()},
    "empty response": {"response_ids": (), "rollout_log_probs": ()},
    "id too large": {"response_ids": (3, VOCAB)},
    "negative id": {"prompt_ids": (-1, 2)},
    "nan": {"rollout_log_probs": (-0.5, float("nan"))},
    "infinite": {"rollout_log_probs": (-0.5, float("-inf"))},
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_what_cannot_be_trained_on_is_masked_as_invalid(fault):
    bad = dataclasses.replace(GOOD, **fault)
    refused = validated(bad, "solver", VOCAB)
    assert refused.masked is MaskReason.INVALID
    assert refused.key == bad.key
    assert (refused.prompt_ids, refused.response_ids, refused.rollout_log_probs) == ((0,), (), ())


def test_what_can_be_trained_on_is_left_alone():
    assert validated(GOOD, "solver", VOCAB) is GOOD
    unanswered = dataclasses.replace(GOOD, response_ids=(), rollout_log_probs=(), masked=MaskReason.PROMPT_TOO_LONG)
    assert validated(unanswered, "solver", VOCAB) is unanswered


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_an_invalid_action_is_not_posted_and_not_trained_on(tmp_path, fault):
    run = InProcessRun(
        tiny_llama(VOCAB, 0),
        max_steps=1,
        score=some_score,
        alter=lambda step, actions: [actions[0], dataclasses.replace(actions[1], **fault), *actions[2:]],
    )
    run.exchange_keys = None
    post = run.exchange

    def exchange(step, stats, kl_coef):
        run.exchange_keys = sorted(key[0] for key in stats)
        return post(step, stats, kl_coef)

    run.exchange = exchange
    play(tmp_path, run)
    assert run.exchange_keys == [f"episode-0-{i}" for i in (0, 2, 3, 4, 5)]
    assert run.reports[0]["trained_actions"] == 5
    assert run.reports[0]["masked_rate"] == pytest.approx(1 / 6)


def test_validation_reads_the_evaluation_at_the_version_just_made(tmp_path):
    run = InProcessRun(tiny_llama(VOCAB, 0), max_steps=4, score=some_score, success={2: 0.2, 4: 0.4})
    trainer = play(tmp_path, run, limit_val_batches=1, val_check_interval=2, check_val_every_n_epoch=None)
    assert [v for call, v in run.calls if call == "evaluation"] == [2, 4]
    assert run.calls.index(("evaluation", 2)) > run.calls.index(("push_weights", 2))
    assert float(trainer.callback_metrics["val/success"]) == pytest.approx(0.4)
    assert trainer.datamodule.version == 4
    assert trainer.datamodule.last_batch.step == 3


def test_validate_alone_reads_the_first_version(tmp_path):
    model = tiny_llama(VOCAB, 0)
    run = InProcessRun(model, success={0: 0.25})
    trainer = make_trainer(tmp_path, limit_val_batches=1)
    (metrics,) = trainer.validate(AgentModule("solver", model), datamodule=RolloutDataModule(run), verbose=False)
    assert metrics["val/success"] == 0.25
    assert run.left == []


def test_the_end_of_the_run_ends_the_fit(tmp_path):
    run = InProcessRun(tiny_llama(VOCAB, 0), max_steps=9, score=some_score, last_step=1)
    trainer = play(tmp_path, run)
    assert sorted(run.reports) == [0, 1]
    assert run.left == [None]
    assert trainer.state.finished


def test_no_batch_is_asked_for_ahead(tmp_path):
    run = InProcessRun(tiny_llama(VOCAB, 0), max_steps=3, score=some_score)
    play(tmp_path, run)
    for step in range(1, 3):
        assert run.calls.index(("experience", step)) > run.calls.index(("push_weights", step))


def test_a_checkpoint_between_two_batches_holds_the_weights_of_its_version(tmp_path):
    saved = tmp_path / "solver.ckpt"
    run = InProcessRun(tiny_llama(VOCAB, 0), max_steps=3, score=some_score, checkpoints={2: saved})
    play(tmp_path, run)
    state = torch.load(saved, weights_only=True)["state_dict"]
    names = trained_tensors(tiny_llama(VOCAB, 0))
    assert all(torch.equal(state[f"policy.model.{name}"], run.pushed[2][name]) for name in names)


def test_a_checkpoint_of_another_step_is_refused(tmp_path):
    saved = tmp_path / "solver.ckpt"
    run = InProcessRun(tiny_llama(VOCAB, 0), max_steps=3, score=some_score, checkpoints={1: saved})
    play(tmp_path, run)
    other = InProcessRun(tiny_llama(VOCAB, 0), max_steps=3, score=some_score, first_step=2)
    with pytest.raises(DataError, match="saved before step 1, the run goes on with step 2"):
        play(tmp_path, other, ckpt_path=saved)


def test_an_error_is_told_to_the_run(tmp_path):
    run = InProcessRun(tiny_llama(VOCAB, 0), score=some_score)

    def broken(step, metrics):
        raise OSError("disk")

    run.report = broken
    with pytest.raises(OSError, match="disk"):
        play(tmp_path, run)
    assert [str(error) for error in run.left] == ["disk"]
