"""Two-turn tool use under the chat template and tokenizer of a real model: what was sampled is trained on."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_mappa.runtime.local
from lightning_mappa import evaluate
from lightning_mappa.errors import ConfigError
from lightning_mappa.models import smollm2
from lightning_mappa.models.load import load_tokenizer
from lightning_mappa.testing import ScriptedEngine
from tests.integration import probes
from tests.integration.conftest import run_fit, small_config, transcript_lines

CODE = "I will compute it.\n```python\nprint('ümlaut', 6 * 7)\n```"
THOUGHT = "<think>Is it 6 or 7?</think> "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The real tokenizer with a random model of its vocabulary."""
    try:
        tokenizer = load_tokenizer(str(smollm2.cached_folder()))
    except ConfigError as error:
        pytest.skip(str(error))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_generated_from_is_trained_on(folder, tmp_path, monkeypatch):
    tokenizer = load_tokenizer(str(folder))

    def script(request, prompt):
        if request.agent_id == "executor":
            return THOUGHT + CODE if "42" not in prompt else "It is 42."
        return "6 * 7" if request.agent_id == "solver" else r"\boxed{42}"

    engine = ScriptedEngine(script, tokenizer)
    monkeypatch.setattr(lightning_mappa.runtime.local, "build_engine", lambda cfg, agents: engine)
    probes.TRAINED.clear()
    summary = run_fit(
        tmp_path / "run",
        "model=hf",
        f"model.path={folder}",
        "trainer.max_steps=1",
        f"+callbacks.note._target_={probes.__name__}.NoteTrainedIds",
        "agents.executor.max_new_tokens=96",
        "agents.solver.max_new_tokens=16",
        "agents.verifier.max_new_tokens=16",
    )
    lines = transcript_lines(tmp_path / "run")
    assert summary["counts"]["trained"] == summary["counts"]["produced"] == len(lines) == 8 * 4
    asked = {request.prompt_ids for request in engine.requests}
    by_key = {(line["episode_id"], line["index"]): line for line in lines}
    for key, line in by_key.items():
        ids = (tuple(line["prompt_ids"]), tuple(line["response_ids"]))
        assert probes.TRAINED[key] == ids
        assert ids[0] in asked
        assert ids[1][-1] == tokenizer.eos_token_id
        if line["turn"] == 1:
            first = by_key[key[0], key[1] - 1]
            before = first["prompt_ids"] + first["response_ids"]
            assert line["prompt_ids"][: len(before)] == before
            assert "ümlaut 42" in tokenizer.decode(line["prompt_ids"][len(before) :])
            # The agent's own thinking stays in its context; the others never see it.
            assert "6 or 7?" in tokenizer.decode(line["prompt_ids"])
        elif line["agent_id"] == "verifier":
            assert "6 or 7?" not in tokenizer.decode(line["prompt_ids"])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["smollm2", "smollm2_lora"])
def test_a_pretrained_model_trains_and_answers_and_its_ratios_are_one(model, tmp_path, capsys):
    try:
        smollm2.cached_folder()
    except ConfigError as error:
        pytest.skip(str(error))
    options = (
        f"model={model}",
        "optimizer.lr=0",
        "trainer.max_steps=1",
        "datamodule.rollout_batch_size=2",
        "algorithm.mini_batch_size=4",
        "datamodule.val_limit=1",
        "prompts.max_new_tokens={solver: 24, executor: 24, verifier: 24, single: 24}",
    )
    run = tmp_path / "run"
    summary = run_fit(run, *options)
    assert summary["counts"]["trained"] > 0
    assert summary["mismatch"]["ratio_max"] == pytest.approx(1.0, abs=1e-3)
    report = evaluate.test(small_config(tmp_path / "test", *options, f"+run={run}", "datamodule.report_limit=2"))
    assert (report["n"], report["gain"]) == (2, 0.0)
    capsys.readouterr()
    evaluate.predict(small_config(tmp_path / "predict", *options, f"+run={run}", "+inputs='What is 3 + 4?'"))
    shown = capsys.readouterr().out
    assert all(f"{role}, turn 1" in shown for role in ("Problem Solver", "Code Executor", "Verifier"))
