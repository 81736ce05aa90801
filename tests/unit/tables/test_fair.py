"""What a failed run counts as, and the process that computes metrics."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest

from lightning_mappa.errors import InfrastructureError
from lightning_mappa.tables.fair import chance_level, fair_metrics
from lightning_mappa.tables.metric_process import MetricProcess
from tests.unit.tables.tables import answers, score_columns, score_text

# -- fair metrics ---------------------------------------------------------------------------------------------------


def test_a_failed_run_counts_as_published_or_as_chance(process, tmp_path):
    three = answers("accuracy", "aabc")
    failed = score_text("id,y0\n1,a\n", three, process, tmp_path)
    assert fair_metrics(failed, three, "paper") == {"fair/accuracy": 0.5, "fair/f1": 0.0}
    # Shares 1/2, 1/4, 1/4 and recall 1/3: F1 0.4 and twice 2/7.
    chance = fair_metrics(failed, three, "chance")
    assert chance == pytest.approx({"fair/accuracy": 1 / 3, "fair/f1": 0.5 * 0.4 + 0.5 * 2 / 7})

    numbers = answers("rmse", [0, 0, 0, 8])
    failed = score_text("", numbers, process, tmp_path)
    assert fair_metrics(failed, numbers, "paper") == {"fair/mae_percent": 50.0, "fair/rmse_percent": 50.0}
    assert fair_metrics(failed, numbers, "chance") == pytest.approx(
        {"fair/mae_percent": 25, "fair/rmse_percent": 100 * math.sqrt(12) / 8}
    )


def test_a_valid_run_counts_as_it_is(process, tmp_path):
    truth = answers("rmse", [0, 10])
    valid = score_columns(truth, process, tmp_path, [0, 40])
    assert fair_metrics(valid, truth, "paper")["fair/mae_percent"] == 150  # not held down to what a failure costs
    text = answers("jaccard", ["a b"])
    assert fair_metrics(score_columns(text, process, tmp_path, ["a"]), text, "chance") == {"fair/jaccard": 0.5}


def test_chance_of_classes_in_columns():
    assert chance_level(answers("log_loss", [1, 0], [0, 0], [0, 1]))["accuracy"] == pytest.approx(1 / 3)
    binary = chance_level(answers("roc_auc", [0, 1, 1, 1]))
    assert binary == pytest.approx({"accuracy": 0.5, "f1": 2 * 0.75 * 0.5 / 1.25})


# -- the process ------------------------------------------------------------------------------------------------------


def test_the_process_is_started_anew_after_it_died():
    process = MetricProcess()
    question = {"form": "number", "metric": "mae", "truth": [[1.0]], "predicted": [[2.0]], "labels": [[]]}
    assert process.measure(question)["mae"] == 1.0
    assert process._process is not None
    process._process.kill()
    process._process.wait()
    assert process.measure(question)["mae"] == 1.0
    with pytest.raises(InfrastructureError, match="metrics failed"):
        process.measure({**question, "predicted": [["x"]]})
    assert process.measure(question)["mae"] == 1.0
    pid = process._process.pid
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_no_module_of_ours_imports_scikit_learn_to_score():
    code = (
        "import sys, lightning_mappa.tables.scoring, lightning_mappa.tables.fair\n"
        "print([m for m in sys.modules if m.startswith(('sklearn', 'pandas'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
