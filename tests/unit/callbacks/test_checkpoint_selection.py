import json

import pytest
import torch
from safetensors.torch import load_file

from lightning_mappa.callbacks.checkpoint_selection import CheckpointSelection
from lightning_mappa.errors import ConfigError, DataError
from lightning_mappa.models.load import trained_tensors
from lightning_mappa.testing import tiny_llama
from tests.unit.in_process import VOCAB, InProcessRun, fit, make_agent, some_score


def play(tmp_path, selection, success, *, first_step=0, checkpoints=None, ckpt_path=None):
    model = tiny_llama(VOCAB, 0)
    initial = {name: tensor.clone() for name, tensor in trained_tensors(model).items()}
    run = InProcessRun(model, first_step=first_step, score=some_score, success=success, checkpoints=checkpoints)
    fit(
        tmp_path,
        run,
        make_agent(model),
        callbacks=[selection],
        ckpt_path=ckpt_path,
        limit_val_batches=1,
        val_check_interval=1,
        check_val_every_n_epoch=None,
    )
    return {0: initial, **run.pushed}


@pytest.mark.parametrize(
    ("mode", "success", "best"),
    [
        ("max", {0: 0.1, 1: 0.3, 2: 0.5, 3: 0.2}, 2),
        ("max", {0: 0.4, 1: 0.3, 2: 0.4, 3: 0.4}, 0),
        ("max", {0: 0.1, 1: 0.3, 2: 0.3, 3: 0.3}, 1),
        ("max", {0: float("nan"), 1: float("nan"), 2: 0.0, 3: float("nan")}, 2),
        ("min", {0: 0.4, 1: 0.3, 2: 0.1, 3: 0.1}, 2),
    ],
)
def test_the_best_version_is_kept_and_ties_go_to_the_earlier(tmp_path, mode, success, best):
    selection = CheckpointSelection(mode=mode, dirpath=tmp_path / "selected")
    versions = play(tmp_path, selection, success)
    assert (selection.selected_version, selection.selected_value) == (best, success[best])
    entry = json.loads((tmp_path / "selected" / "selected.json").read_text())
    assert entry["version"] == best
    assert entry["agent_id"] == "solver"
    tensors = load_file(tmp_path / "selected" / entry["tensors"])
    assert tensors.keys() == versions[best].keys()
    assert all(torch.equal(tensors[name], versions[best][name]) for name in tensors)
    kept = {entry["tensors"]} | ({entry["previous"]["tensors"]} if entry["previous"] else set())
    assert {p.name for p in (tmp_path / "selected").iterdir()} == {"selected.json", *kept}


def test_a_resumed_run_selects_the_same_even_from_weights_replaced_after_its_checkpoint(tmp_path):
    saved = tmp_path / "solver.ckpt"
    success = {0: 0.1, 1: 0.3, 2: 0.5, 3: 0.2}
    play(tmp_path, CheckpointSelection(), success, checkpoints={1: saved})

    resumed = CheckpointSelection()
    play(tmp_path, resumed, {2: 0.2, 3: 0.2}, first_step=1, ckpt_path=saved)
    assert (resumed.selected_version, resumed.selected_value) == (1, 0.3)
    assert (tmp_path / "selected" / "version-000001.safetensors").is_file()
    # Not version 2, which the first run selected after this checkpoint.
    assert json.loads((tmp_path / "selected" / "selected.json").read_text())["version"] == 1

    (tmp_path / "selected" / "version-000001.safetensors").unlink()
    with pytest.raises(DataError, match=r"version-000001\.safetensors are gone"):
        play(tmp_path, CheckpointSelection(), success, first_step=1, ckpt_path=saved)


def test_an_unknown_metric_is_refused_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match=r"monitor='val/succes'\): the evaluation has val/success"):
        play(tmp_path, CheckpointSelection(monitor="val/succes"), {})


def test_another_mode_is_refused():
    with pytest.raises(ConfigError, match="mode='best'"):
        CheckpointSelection(mode="best")
