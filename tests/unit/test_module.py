"""AgentModule under real Trainers, against a run in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_mappa.callbacks.kl_penalty import KLPenalty
from lightning_mappa.callbacks.weight_sync import WeightSync
from lightning_mappa.datamodules.rollout import RolloutDataModule
from lightning_mappa.errors import ConfigError, NotAvailableError, NumericError
from lightning_mappa.models.load import add_adapter, trained_tensors
from lightning_mappa.schedule import lr_factor
from lightning_mappa.testing import tiny_llama
from tests.unit.in_process import LIKED, VOCAB, InProcessRun, fit, make_agent, make_trainer, some_score

LORA = {"r": 4, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear"}


def values(model):
    return {name: tensor.clone() for name, tensor in trained_tensors(model).items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_lr_0_leaves_the_weights_and_the_ratio_alone(tmp_path):
    model = tiny_llama(VOCAB, 0)
    before = values(model)
    run = InProcessRun(model, score=some_score)
    fit(tmp_path, run, make_agent(model, lr=0.0, mini_batch_size=2), callbacks=[KLPenalty()])
    assert same(before, values(model))
    for report in run.reports.values():
        assert report["mismatch/ratio_max"] == pytest.approx(1.0, abs=1e-4)
        assert report["mismatch/ratio_min"] == pytest.approx(1.0, abs=1e-4)
        assert report["kl"] == 0.0
        assert abs(report["ppo_kl"]) < 1e-6
        assert report["trained_actions"] == 6


def test_a_resumed_run_with_more_steps_takes_its_own_learning_rates_from_its_first_step_on(tmp_path):
    saved = tmp_path / "solver.ckpt"
    first = InProcessRun(tiny_llama(VOCAB, 0), max_steps=4, score=some_score, checkpoints={2: saved})
    fit(tmp_path, first, make_agent(tiny_llama(VOCAB, 0), max_steps=4))
    resumed = InProcessRun(tiny_llama(VOCAB, 0), max_steps=20, first_step=2, score=some_score)
    module = make_agent(tiny_llama(VOCAB, 0), max_steps=20)
    fit(tmp_path, resumed, module, ckpt_path=saved)
    for step in (2, 3, 19):
        expected = module.lr * lr_factor(step, max_steps=20, warmup_ratio=0.03, min_lr_ratio=0.1)
        assert resumed.reports[step]["lr"] == pytest.approx(expected)


@pytest.mark.parametrize("lora", [None, {**LORA, "r": 8, "alpha": 64}], ids=["full", "lora"])
def test_it_learns_the_token_that_the_script_likes(tmp_path, lora):
    model = tiny_llama(VOCAB, 1)
    if lora is not None:
        model = add_adapter(model, seed=0, **lora)
    run = InProcessRun(model, max_steps=25, n_actions=16)
    fit(tmp_path, run, make_agent(model, lr=1e-2, max_steps=25), callbacks=[KLPenalty(kl_coef=0.001)])
    scores = [run.reports[step]["score_mean"] for step in range(25)]
    assert sum(scores[:3]) / 3 < 2.0
    assert sum(scores[-3:]) / 3 > 7.0


def test_one_seed_gives_one_result(tmp_path):
    ends = []
    for _ in range(2):
        model = tiny_llama(VOCAB, 0)
        fit(tmp_path, InProcessRun(model, score=some_score), make_agent(model), callbacks=[KLPenalty()])
        ends.append(values(model))
    assert same(*ends)


def test_a_step_without_actions_is_reported_and_changes_nothing(tmp_path):
    model = tiny_llama(VOCAB, 0)
    before = values(model)
    run = InProcessRun(model, max_steps=2, alter=lambda step, actions: [])
    fit(tmp_path, run, make_agent(model, weight_decay=0.1), callbacks=[KLPenalty()])
    assert same(before, values(model))
    assert [run.reports[step]["empty"] for step in (0, 1)] == [1.0, 1.0]
    assert "pg_loss" not in run.reports[0]
    assert sorted(run.pushed) == [1, 2]


def test_equal_scores_give_no_optimizer_step(tmp_path):
    model = tiny_llama(VOCAB, 0)
    run = InProcessRun(model, max_steps=2, score=lambda ids: float(ids[0]) if len(run.reports) == 0 else 7.0)
    fit(tmp_path, run, make_agent(model, max_steps=2), callbacks=[KLPenalty()])
    assert run.reports[1]["empty"] == 1.0
    assert run.reports[1]["trained_actions"] == 6.0
    assert same(run.pushed[1], run.pushed[2])  # Adam's momentum of step 0 moves nothing


def poison(model, steps):
    """Makes the gradient of these backward passes not a number."""
    count = iter(range(1000))
    model.lm_head.weight.register_hook(lambda grad: grad * float("nan") if next(count) in steps else grad)


def test_a_non_finite_gradient_is_skipped_and_counted(tmp_path):
    model = tiny_llama(VOCAB, 0)
    poison(model, {0, 2})
    run = InProcessRun(model, max_steps=3, score=some_score)
    fit(tmp_path, run, make_agent(model, max_skipped_steps=2))
    assert [run.reports[step]["skipped"] for step in range(3)] == [1.0, 0.0, 1.0]
    assert [run.reports[step]["skipped_actions"] for step in range(3)] == [6.0, 0.0, 6.0]
    assert [run.reports[step]["trained_actions"] for step in range(3)] == [0.0, 6.0, 0.0]
    assert same(run.pushed[2], run.pushed[3])
    assert not same(run.pushed[1], run.pushed[2])


def test_non_finite_gradients_in_a_row_end_the_run(tmp_path):
    model = tiny_llama(VOCAB, 0)
    poison(model, {1, 2, 3, 4})
    run = InProcessRun(model, max_steps=9, score=some_score)
    with pytest.raises(NumericError, match="agent solver: loss or gradient not finite, 3 optimizer steps in a row"):
        fit(tmp_path, run, make_agent(model, max_steps=9))
    assert sorted(run.reports) == [0, 1, 2]
    assert [type(error) for error in run.left] == [NumericError]


def test_a_policy_that_gives_no_numbers_posts_nothing_and_ends_the_run(tmp_path):
    model = tiny_llama(VOCAB, 0)
    run = InProcessRun(model, max_steps=9, score=some_score)
    module = make_agent(model, max_skipped_steps=2)
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    trainer = make_trainer(tmp_path)
    with pytest.raises(NumericError, match="log-probs not finite, 2 optimizer steps in a row"):
        trainer.fit(module, datamodule=RolloutDataModule(run))
    assert run.reports[0]["skipped"] == 1.0
    assert run.reports[0]["trained_actions"] == 0.0


class Dtypes(Callback):
    def __init__(self) -> None:
        self.seen: set[torch.dtype] = set()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.add(batch.rollout_log_probs_BT.dtype)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen |= {getattr(batch, f"{name}_log_probs_BT").dtype for name in ("rollout", "old", "ref")}
        self.seen.add(batch.advantages_BT.dtype)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_log_probs_stay_float32_under_bf16(tmp_path, precision):
    model = tiny_llama(VOCAB, 0)
    run = InProcessRun(model, max_steps=2, score=some_score)
    dtypes = Dtypes()
    fit(tmp_path, run, make_agent(model, max_steps=2), callbacks=[KLPenalty(), dtypes], precision=precision)
    assert dtypes.seen == {torch.float32}
    assert run.reports[0]["kl"] == 0.0
    assert run.reports[0]["grad_norm"] > 0.0
    assert abs(run.reports[1]["kl"]) > 1e-3


def test_lora_dropout_acts_in_the_gradient_pass_only(tmp_path):
    model = add_adapter(tiny_llama(VOCAB, 0), seed=0, **{**LORA, "dropout": 0.5})
    run = InProcessRun(model, max_steps=2, score=some_score)
    fit(tmp_path, run, make_agent(model, max_steps=2), callbacks=[KLPenalty()])
    assert run.reports[0]["kl"] == 0.0
    assert run.reports[1]["mismatch/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert run.reports[1]["ppo_kl"] != 0.0


def test_lightnings_own_callbacks_and_loggers_work(tmp_path):
    model = tiny_llama(VOCAB, 0)
    run = InProcessRun(model, max_steps=9, score=some_score, success={1: 0.2, 2: 0.4, 3: 0.3, 4: 0.1})
    monitor = LearningRateMonitor(logging_interval="step")
    csv = CSVLogger(tmp_path, name="csv")
    trainer = make_trainer(
        tmp_path,
        callbacks=[WeightSync(), monitor, EarlyStopping("val/success", mode="max", patience=2)],
        logger=[csv, TensorBoardLogger(tmp_path, name="tb")],
        limit_val_batches=1,
        val_check_interval=1,
        check_val_every_n_epoch=None,
    )
    trainer.fit(make_agent(model, lr=1e-3, max_steps=9, warmup_ratio=0.2), datamodule=RolloutDataModule(run))
    assert sorted(run.reports) == [0, 1, 2, 3]
    assert run.left == [None]
    assert [step for call, step in run.calls if call == "evaluation"] == [1, 2, 3, 4]
    assert monitor.lrs["lr-AdamW/decay"] == pytest.approx([run.reports[step]["lr"] for step in range(4)])
    assert monitor.lrs["lr-AdamW/decay"][:2] == pytest.approx([5e-4, 1e-3])
    text = Path(csv.experiment.metrics_file_path).read_text()
    assert "val/success" in text
    assert "train/grad_norm" in text
    assert list((tmp_path / "tb").rglob("events.out.tfevents.*"))


def test_skips_in_a_row_are_counted_across_a_resume(tmp_path):
    saved = tmp_path / "solver.ckpt"
    model = tiny_llama(VOCAB, 0)
    run = InProcessRun(model, max_steps=4, score=some_score, checkpoints={1: saved})
    poison(model, {0})
    fit(tmp_path, run, make_agent(model, max_steps=4, max_skipped_steps=2))
    model = tiny_llama(VOCAB, 0)
    resumed = InProcessRun(model, max_steps=4, score=some_score, first_step=1)
    poison(model, {0})
    with pytest.raises(NumericError, match="2 optimizer steps in a row"):
        fit(tmp_path, resumed, make_agent(model, max_steps=4, max_skipped_steps=2), ckpt_path=saved)


def test_weight_decay_spares_norms_and_biases(tmp_path):
    module = make_agent(tiny_llama(VOCAB, 0), weight_decay=0.1)
    optimizer = module.configure_optimizers()
    decay, no_decay = optimizer.param_groups
    assert (decay["weight_decay"], no_decay["weight_decay"]) == (0.1, 0.0)
    assert {p.ndim for p in decay["params"]} == {2}
    assert {p.ndim for p in no_decay["params"]} == {1}
    assert len(decay["params"]) + len(no_decay["params"]) == len(list(module.parameters()))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mini_batch_size": 0}, ConfigError, "mini_batch_size is 0; allowed: at least 1"),
        ({"micro_batch_size": -1}, ConfigError, "micro_batch_size is -1"),
        ({"policy_loss": "gspo"}, NotAvailableError, "gspo is not available"),
        ({"policy_loss": "pppo"}, ConfigError, "pppo"),
        ({"loss_agg_mode": "mean"}, ConfigError, "token-mean"),
        ({"clip_ratio_low": 1.5}, ConfigError, "clip_ratio_low is 1.5"),
        ({"rollout_correction": 0.0}, ConfigError, "rollout_correction is 0.0"),
    ],
)
def test_what_is_not_allowed_is_refused_by_name(options, error, message):
    with pytest.raises(error, match=message):
        make_agent(tiny_llama(VOCAB, 0), **options)


def test_a_trainer_without_a_run_is_refused(tmp_path):
    module = make_agent(tiny_llama(VOCAB, 0))
    with pytest.raises(ConfigError, match="must be a RolloutDataModule; given: NoneType"):
        make_trainer(tmp_path).fit(module, train_dataloaders=[1])


def test_lightnings_max_steps_is_refused(tmp_path):
    run = InProcessRun(tiny_llama(VOCAB, 0))
    with pytest.raises(ConfigError, match=r"Trainer\(max_steps=7\) counts optimizer steps"):
        fit(tmp_path, run, make_agent(tiny_llama(VOCAB, 0)), max_steps=7)
    with pytest.raises(ConfigError, match=r"Trainer\(max_epochs=2\)"):
        fit(tmp_path, run, make_agent(tiny_llama(VOCAB, 0)), max_epochs=2)


def test_the_liked_token_is_not_what_the_model_says_anyway():
    run = InProcessRun(tiny_llama(VOCAB, 1), n_actions=16)
    tokens = [token for e in run.experience(0) for token in e.response_ids]
    assert tokens.count(LIKED) / len(tokens) < 0.2
