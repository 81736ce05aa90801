import json

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.cli import LightningCLI

from lightning_mappa.algorithm.advantages import ActionRow, ActionStats, CreditSettings, credit
from lightning_mappa.callbacks.checkpoint_selection import CheckpointSelection
from lightning_mappa.callbacks.kl_penalty import KLPenalty
from lightning_mappa.callbacks.weight_sync import WeightSync
from lightning_mappa.datamodules.transcript import TranscriptDataModule, read_steps
from lightning_mappa.errors import ConfigError, DataError
from lightning_mappa.module import AgentModule
from lightning_mappa.rollout.transcripts import step_path, write_transcript
from lightning_mappa.testing import tiny_llama
from lightning_mappa.types import EpisodeStatus, MaskReason, StopReason
from tests.unit.factories import make_action, make_scored
from tests.unit.in_process import VOCAB, make_trainer

SETTINGS = CreditSettings(return_scope="trajectory", norm_scope="all")
SCORES = [[3.0, 8.0], [6.0, None], [9.0, 1.0]]
"""Per episode: the solver's action, then the verifier's. A missing verdict makes the one before unknown."""


def episode(step, number):
    actions = tuple(
        make_action(
            episode_id=f"{step}-{number}",
            index=index,
            agent_id=agent_id,
            prompt_ids=(1, 2, 3 + index),
            response_ids=[4 + (step + number + k) % 9 for k in range(2 + index)],
            rollout_log_probs=(-1.5,) * (2 + index),
            stop_reason=StopReason.LENGTH if number == 2 else StopReason.STOP,
            policy_version=step,
        )
        for index, agent_id in enumerate(["solver", "verifier"])
    )
    return make_scored(f"{step}-{number}", actions, SCORES[number])


def rows_of(episodes):
    return [
        ActionRow(
            key=(action.episode_id, action.index),
            agent_id=action.agent_id,
            turn=0,
            reward=None if verdict.score is None else verdict.score / 10,
            masked=MaskReason.MISSING_VERDICT if verdict.score is None else None,
            frozen=False,
            kl_coef=0.5,
            stats=ActionStats(n_tokens=len(action.response_ids), kl_sum=0.25 * action.index),
        )
        for scored in episodes
        for action, verdict in zip(scored.episode.actions, scored.verdicts, strict=True)
    ]


@pytest.fixture
def run(tmp_path):
    """The folder of a recorded run of two steps."""
    for step in range(2):
        episodes = [episode(step, number) for number in range(3)]
        failed = make_scored(f"{step}-failed", [], [], status=EpisodeStatus.FAILED, outcome=None)
        rows = rows_of(episodes)
        write_transcript(
            step_path(tmp_path / "transcripts", step),
            [*episodes, failed],
            step=step,
            split="train",
            rows=rows,
            credits=credit(rows, SETTINGS),
        )
    return tmp_path


def test_a_recorded_step_is_read_back(run):
    first, second = read_steps(run)
    assert (first.number, second.number) == (0, 1)
    episodes = [episode(0, number) for number in range(3)]
    assert list(first.rows) == rows_of(episodes)
    assert first.cut_episodes == {"0-failed"}
    solver = first.experiences[4]
    assert (solver.key, solver.agent_id, solver.score, solver.truncated) == (("0-2", 0), "solver", 9.0, True)
    assert solver.prompt_ids == (1, 2, 3)
    assert [e.masked for e in first.experiences] == [None] * 3 + [MaskReason.MISSING_VERDICT] + [None] * 2


class Advantages(Callback):
    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        masks = batch.response_mask_BT
        self.steps.append([float(row[mask][0]) for row, mask in zip(batch.advantages_BT, masks, strict=True)])


def test_credit_formed_anew_is_the_recorded_one(run, tmp_path):
    kept = Advantages()
    data = TranscriptDataModule(str(run), "solver", SETTINGS)
    make_trainer(tmp_path, callbacks=[kept]).fit(AgentModule("solver", tiny_llama(VOCAB, 0)), datamodule=data)
    for step, advantages in enumerate(kept.steps):
        lines = [json.loads(line) for line in step_path(run / "transcripts", step).read_text().splitlines()]
        recorded = [line for line in lines if line.get("agent_id") == "solver"]
        assert [line["masked"] for line in recorded] == [None, "return_unknown", None]
        assert advantages == pytest.approx([line["advantage"] or 0.0 for line in recorded], abs=1e-6)
        assert advantages[0] != 0.0
    assert len(kept.steps) == 2


def test_the_agents_own_kl_is_measured_anew(run, tmp_path):
    model = tiny_llama(VOCAB, 0)
    module = AgentModule("verifier", model, lr=1e-2)
    data = TranscriptDataModule(str(run / "transcripts"), "verifier", SETTINGS)
    trainer = make_trainer(tmp_path, callbacks=[KLPenalty(kl_coef=0.5)])
    trainer.fit(module, datamodule=data)
    assert float(trainer.callback_metrics["train/kl"]) != 0.0
    assert float(trainer.callback_metrics["train/trained_actions"]) == 2


@pytest.mark.parametrize("callback", [WeightSync(), CheckpointSelection()])
def test_what_needs_a_live_run_is_refused(run, tmp_path, callback):
    trainer = make_trainer(tmp_path, callbacks=[callback])
    with pytest.raises(ConfigError, match="needs a run"):
        trainer.fit(AgentModule("solver", tiny_llama(VOCAB, 0)), datamodule=TranscriptDataModule(str(run), "solver"))


def damage(run, change):
    """Rewrites line 2 of step 1 through `change`."""
    path = step_path(run / "transcripts", 1)
    lines = path.read_text().splitlines()
    lines[1] = change(lines[1])
    path.write_text("\n".join(lines) + "\n")


def without(name):
    def change(line):
        record = json.loads(line)
        del record[name]
        return json.dumps(record)

    return change


def with_value(name, value):
    return lambda line: json.dumps({**json.loads(line), name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda line: line[:-5], "not JSON"),
        (lambda line: "[]", "TypeError"),
        (without("prompt_ids"), "KeyError 'prompt_ids'"),
        (with_value("masked", "tired"), "ValueError 'tired' is not a valid MaskReason"),
        (with_value("stats", {"n_tokens": 1, "n": 2}), "TypeError"),
        (with_value("stats", None), "never credited"),
    ],
)
def test_a_damaged_line_is_named(run, change, message):
    damage(run, change)
    with pytest.raises(DataError, match=rf"step-000001\.jsonl, line 2: .*{message}"):
        list(read_steps(run))


def test_a_missing_step_is_named(run):
    step_path(run / "transcripts", 0).rename(step_path(run / "transcripts", 3))
    with pytest.raises(DataError, match=r"step-000002\.jsonl is missing"):
        list(read_steps(run))


def test_wrong_paths_and_agents_are_refused(run, tmp_path_factory):
    with pytest.raises(ConfigError, match="holds no transcripts"):
        TranscriptDataModule(str(tmp_path_factory.mktemp("empty")), "solver")
    with pytest.raises(ConfigError, match=r"agent_id='judge' is not in .*; recorded are solver, verifier"):
        TranscriptDataModule(str(run), "judge")


def test_lightning_cli_fits_from_a_config_file(run, tmp_path):
    tiny_llama(VOCAB, 0).save_pretrained(tmp_path / "model")
    config = {
        "seed_everything": 0,
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "log_every_n_steps": 1,
            "default_root_dir": str(tmp_path),
            "callbacks": [
                {
                    "class_path": "lightning_mappa.callbacks.kl_penalty.KLPenalty",
                    "init_args": {"kl_coef": 0.1},
                }
            ],
        },
        "model": {"agent_id": "solver", "model": str(tmp_path / "model"), "lr": 0.01, "max_steps": 2},
        "data": {
            "path": str(run),
            "agent_id": "solver",
            "credit": {"return_scope": "trajectory", "norm_scope": "all"},
        },
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    before = tiny_llama(VOCAB, 0).state_dict()
    cli = LightningCLI(
        AgentModule,
        TranscriptDataModule,
        args=["fit", "--config", str(tmp_path / "config.yaml")],
        save_config_callback=None,
    )
    assert cli.trainer.state.finished
    assert float(cli.trainer.callback_metrics["train/trained_actions"]) == 2
    after = cli.model.model.state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)
