"""Several samples per problem, from `fit` over `validate` to `test`."""

from __future__ import annotations

import json

import pytest

from lightning_mappa import evaluate
from lightning_mappa.errors import ConfigError
from tests.integration.conftest import run_fit, small_config
from tests.packages import needs


@pytest.mark.slow
def test_fit_validate_and_test_agree_on_several_samples(tmp_path, capsys):
    folder = tmp_path / "run"
    summary = run_fit(folder, "datamodule.val_n_samples=2", "trainer.max_steps=1")
    assert summary["val"]["peak"]["success"] == max(summary["val"]["history"].values())
    line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["val"]
    assert {"mean@2", "pass@2", "maj@2", "behaviour/executor/tool_call_rate"} <= set(line)
    assert line["success"] == line["mean@2"]
    assert line["mean@2"] <= line["pass@2"]

    cfg = small_config(tmp_path / "other", "datamodule.val_n_samples=2", "datamodule.report_limit=6", f"+run={folder}")
    measured = evaluate.validate(cfg)
    assert measured["version"] == summary["selected_version"]
    assert measured["val"]["success"] == summary["val"]["success"]["selected"]
    if measured["version"] == 1:
        assert measured["val"] == line

    result = evaluate.test(cfg)
    assert set(result["figures"]) == {"mean@2", "pass@2", "maj@2"}
    assert result["selection"]["peak"] == summary["val"]["peak"]
    assert "selection split, which chose: peak" in capsys.readouterr().out
    (folder / "test.json").unlink()
    with pytest.raises(ConfigError, match="has been read already"):
        evaluate.test(cfg)


@pytest.mark.slow
@needs("math_verify")
def test_figures_over_shipped_examples_are_named_after_them(tmp_path, capsys):
    sets = (
        *("task=math_sets", "task.train.path=fixture/gsm8k", "task.train.format=gsm8k", "task.selection=3"),
        *("task.report.path=fixture/math", "task.report.format=math"),
    )
    folder = tmp_path / "run"
    run_fit(folder, *sets, "trainer.max_steps=1", "datamodule.val_limit=3")
    line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["val"]
    assert line["fixture"] == 1.0
    assert "success/fixture/gsm8k" in line
    result = evaluate.test(small_config(tmp_path / "other", *sets, f"+run={folder}"))
    assert result["n"] == 8
    assert {name for name in result["initial_by_kind"] if name.startswith("success/")} == {
        f"success/fixture/math/{level}" for level in (1, 2, 3, 4)
    }
    assert "report split (fixture/math/1, fixture/math/2" in capsys.readouterr().out
