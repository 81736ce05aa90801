"""A whole run: what is trained on, what is written down, and that it comes out the same again."""

from __future__ import annotations

import json

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_mappa import evaluate
from lightning_mappa.errors import CoachError, ConfigError
from lightning_mappa.models.load import load_model
from lightning_mappa.rollout.transformers_engine import TransformersEngine
from tests.integration import probes
from tests.integration.conftest import exported, run_fit, small_config, transcript_lines, untimed_lines

AGENTS = ("solver", "executor", "verifier")
PROBES = "tests.integration.probes"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """One run that several tests look at, with everything the engine was asked and answered."""
    generated = []
    decode = TransformersEngine.generate_batch

    def noting(self, requests):
        answers = decode(self, requests)
        generated.extend(zip(requests, answers, strict=True))
        return answers

    probes.TRAINED.clear()
    folder = tmp_path_factory.mktemp("base") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformersEngine, "generate_batch", noting)
        summary = run_fit(folder, f"+callbacks.note._target_={PROBES}.NoteTrainedIds")
    return folder, summary, generated, dict(probes.TRAINED)


def test_generated_from_is_trained_on_for_every_action(base):
    folder, _, generated, trained = base
    asked = {(request.prompt_ids, answer.response_ids) for request, answer in generated}
    lines = transcript_lines(folder)
    assert len(lines) == len(trained) > 16
    assert max(line["turn"] for line in lines) == 1, "no agent took a second turn"
    for line in lines:
        key = (line["episode_id"], line["index"])
        ids = (tuple(line["prompt_ids"]), tuple(line["response_ids"]))
        assert trained[key] == ids
        assert ids in asked


def test_the_second_turn_continues_the_very_ids_of_the_first(base):
    lines = {(line["episode_id"], line["index"]): line for line in transcript_lines(base[0])}
    second = [line for line in lines.values() if line["turn"] == 1]
    for line in second:
        first = lines[line["episode_id"], line["index"] - 1]
        before = first["prompt_ids"] + first["response_ids"]
        assert line["prompt_ids"][: len(before)] == before
        assert len(line["prompt_ids"]) > len(before)


def test_the_end_of_turn_token_is_trained_and_nothing_comes_after_it(base):
    end = AutoTokenizer.from_pretrained(base[0] / "export" / "solver").eos_token_id
    for line in transcript_lines(base[0]):
        assert (line["response_ids"][-1] == end) == (line["stop_reason"] == "stop")
        assert end not in line["response_ids"][:-1]


def test_engine_and_trainer_agree_at_step_zero(base):
    line = json.loads((base[0] / "metrics.jsonl").read_text().splitlines()[0])
    for agent in AGENTS:
        assert line["agents"][agent]["mismatch/ratio_max"] == pytest.approx(1.0, abs=1e-4)
        assert line["agents"][agent]["mismatch/ratio_min"] == pytest.approx(1.0, abs=1e-4)
        assert line["agents"][agent]["kl"] == 0.0


def test_summary_and_metrics_have_what_was_promised(base):
    folder, summary, _, _ = base
    assert summary == json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["val"]["n"] == 6
    assert 0 <= summary["val"]["success"]["initial"] <= summary["val"]["success"]["selected"] <= 1
    assert summary["counts"]["produced"] == summary["counts"]["trained"] == len(transcript_lines(folder))
    assert set(summary["timing_s"]) >= {"rollout", "coach", "update", "weight_sync"}
    assert summary["mismatch"]["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert set(summary["score"]) == set(AGENTS)
    tiers = {result["tier"] for line in transcript_lines(folder) for result in line["tool_results"]}
    assert tiers == {summary["isolation"]["python"]} != {""}
    wanted = {
        *("pg_loss", "grad_norm", "pg_clipfrac", "ppo_kl", "kl", "entropy", "lr", "response_length"),
        *("truncation_rate", "missing_verdict_rate", "advantage_std"),
    }
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        for agent in AGENTS:
            assert wanted <= set(line["agents"][agent])
        assert line["agents"]["executor"]["tool_call_rate"] > 0 == line["agents"]["solver"]["tool_call_rate"]
        assert 0 <= line["agents"]["executor"]["tool_ok_rate"] <= 1


def test_every_verdict_has_a_reason_and_every_reward_its_score(base):
    for line in transcript_lines(base[0]):
        assert line["verdict"]["reason"]
        assert line["reward"] == pytest.approx(line["verdict"]["score"] / 10)
        assert line["advantage"] is not None


def test_the_export_loads_and_is_the_selected_version(base):
    folder, summary, _, _ = base
    start = load_model("tiny", dtype="float32").state_dict()
    for agent in AGENTS:
        model = AutoModelForCausalLM.from_pretrained(folder / "export" / agent)
        AutoTokenizer.from_pretrained(folder / "export" / agent)
        same = all(torch.equal(value, start[name]) for name, value in model.state_dict().items())
        assert same == (summary["selected_version"] == 0)


def test_the_report_split_is_read_once(base, capsys):
    folder = base[0]
    cfg = small_config(folder.parent / "other", "datamodule.report_limit=8", f"+run={folder}")
    result = evaluate.test(cfg)
    assert result == json.loads((folder / "test.json").read_text())
    assert result["n"] == 8
    assert result["gain"] == pytest.approx(result["selected"] - result["initial"])
    report = {line["task"]["id"] for line in transcript_lines(folder, "report-*.jsonl")}
    used = {line["task"]["id"] for line in transcript_lines(folder)}
    assert len(report) == 8
    assert not report & used
    with pytest.raises(ConfigError, match="has been read already"):
        evaluate.test(cfg)


def test_validate_repeats_what_fit_measured(base, capsys):
    folder, summary, _, _ = base
    cfg = small_config(folder.parent / "other", f"+run={folder}")
    assert evaluate.validate(cfg)["val"]["success"] == summary["val"]["success"]["selected"]


def test_predict_shows_every_action(base, capsys, tmp_path):
    tasks = tmp_path / "tasks.txt"
    tasks.write_text("Ann has 12 pens. She buys 7 more. How many?\nBob has 3 cats. How many?\n")
    cfg = small_config(tmp_path / "other", f"+run={base[0]}", f"+inputs={tasks}")
    answers = evaluate.predict(cfg)["answers"]
    shown = capsys.readouterr().out
    assert len(answers) == 2
    assert shown.count("Problem Solver, turn 1") == shown.count("Verifier, turn 1") == 2
    assert "Code Executor, turn 1" in shown


def test_two_runs_with_one_seed_are_the_same_to_the_byte(base, tmp_path):
    run_fit(tmp_path / "again")
    for agent in AGENTS:
        first, second = exported(base[0], agent), exported(tmp_path / "again", agent)
        assert all(torch.equal(first[name], second[name]) for name in first)
    for name in ("step-000000.jsonl", "step-000001.jsonl", "selection-000002.jsonl"):
        assert untimed_lines(base[0], name) == untimed_lines(tmp_path / "again", name)


def test_another_seed_gives_other_samples(base, run, tmp_path):
    run("seed=1", "trainer.max_steps=1")
    first = {tuple(line["response_ids"]) for line in transcript_lines(base[0], "step-000000.jsonl")}
    second = {tuple(line["response_ids"]) for line in transcript_lines(tmp_path / "run", "step-000000.jsonl")}
    assert first != second


def test_a_learning_rate_of_zero_changes_no_weight(run, tmp_path):
    summary = run("optimizer.lr=0", "trainer.max_steps=3", "trainer.val_check_interval=3")
    start = load_model("tiny", dtype="float32").state_dict()
    for agent in AGENTS:
        assert all(torch.equal(value, start[name]) for name, value in exported(tmp_path / "run", agent).items())
    assert summary["mismatch"]["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert len(set(summary["val"]["history"].values())) == 1


@pytest.mark.parametrize("reward", [("outcome",), ("mix", "algorithm.process_weight=0", "algorithm.outcome_weight=1")])
def test_a_run_that_reads_no_score_needs_no_verdict(run, reward):
    summary = run(f"coach._target_={PROBES}.Silent", f"algorithm.reward={reward[0]}", *reward[1:])
    assert summary["counts"]["trained"] > 0
    assert summary["masked"] == {}


def test_a_run_that_reads_scores_ends_where_none_come(run):
    with pytest.raises(CoachError, match="7 of the last 7 verdicts are missing"):
        run(f"coach._target_={PROBES}.Silent")


def test_counts_add_up_with_failures_missing_verdicts_cut_actions_and_uneven_turns(run, tmp_path):
    probes.FailSome.count = 0
    summary = run(
        f"workflow._target_={PROBES}.FailSome",
        f"coach._target_={PROBES}.ForgetSome",
        "coach.max_missing_rate=0.5",
        "agents.solver.max_new_tokens=7",
        "algorithm.truncated=mask",
        "algorithm.return_scope=trajectory",
        "agents.verifier.trained=false",
    )
    counts, masked = summary["counts"], summary["masked"]
    assert counts["produced"] == counts["trained"] + counts["masked"] + counts["queued"] + counts["frozen"]
    assert {"truncated", "missing_verdict", "return_unknown"} <= set(masked)
    assert sum(masked.values()) == counts["masked"]
    assert counts["frozen"] > 0
    lines = transcript_lines(tmp_path / "run")
    assert {line["episode"]["reason"] for line in lines} == {"", "RuntimeError: lost"}
    assert sum(line["masked"] is None and not line["frozen"] for line in lines) == counts["trained"]


def test_adapters_train_on_one_shared_base_and_export_as_adapters(run, tmp_path):
    summary = run("model=tiny_lora")
    assert summary["mismatch"]["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert summary["counts"]["trained"] == summary["counts"]["produced"]
    for agent in AGENTS:
        folder = tmp_path / "run" / "export" / agent
        assert (folder / "adapter_model.safetensors").is_file()
        assert sum(p.numel() for p in AutoPeftModelForCausalLM.from_pretrained(folder).parameters()) > 0


def test_partial_information_hides_all_but_the_previous_agent(run, tmp_path):
    run("workflow.visibility=partial", "trainer.max_steps=1", "agents.verifier.user='{{ seen | length }}'")
    asked = {line["prompt_text"] for line in transcript_lines(tmp_path / "run") if line["agent_id"] == "verifier"}
    assert asked == {"1"}


def test_a_single_agent_workflow_runs(run):
    summary = run("workflow=single")
    assert set(summary["score"]) == {"solver"}
    assert summary["counts"]["trained"] == summary["counts"]["produced"] == 16


def test_lightning_callbacks_and_loggers_work_as_they_are(run, tmp_path):
    summary = run(
        "callbacks=[default,lr_monitor,early_stopping]",
        "callbacks.early_stopping.patience=1",
        "logger=[csv,tensorboard]",
        "trainer.max_steps=5",
        "optimizer.lr=0",
    )
    # Success cannot rise at lr 0: version 1 sets the mark, version 2 is the one too many.
    assert summary["steps"] == 2
    assert summary["status"] == "done"
    folder = tmp_path / "run"
    for agent in AGENTS:
        text = (folder / "csv" / agent / "version_0" / "metrics.csv").read_text()
        assert "train/pg_loss" in text
        assert "val/success" in text
        assert "lr-AdamW" in text
        assert list((folder / "tensorboard" / agent).glob("*/events.*"))
