"""What a submission is worth: hand-worked metrics, spellings that must not matter, and every reason to refuse."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_mappa.errors import ConfigError
from lightning_mappa.tables.fair import chance_level
from lightning_mappa.tables.spec import METRICS, TableSpec
from tests.unit.tables.tables import answers, score_columns, score_text, text_of

LOG_2 = math.log(2)


# -- hand-worked values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "truth", "predicted", "value"),
    [
        ("accuracy", "aabb", "abbb", 0.75),
        ("f1", [0, 1, 1, 0], [1, 1, 0, 0], 0.5),
        ("f1_micro", "abca", "abba", 0.75),
        ("f1_macro", "abca", "abba", (1 + 2 / 3 + 0) / 3),
        ("f1_weighted", "abca", "abba", (2 * 1 + 1 * 2 / 3 + 0) / 4),
        # One square of 2² in four rows, over (9·3 + 1·1 + 4·3 + 9·2) / 16, which chance would give.
        ("quadratic_weighted_kappa", [3, 4, 6, 6], [3, 6, 6, 6], 1 - 1 / 3.625),
        ("mcc", [1, 1, 0, 0], [1, 0, 0, 0], 2 / math.sqrt(1 * 2 * 2 * 3)),
        ("roc_auc", [0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8], 0.75),
        ("normalized_gini", [0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8], 0.5),
        ("log_loss", [0, 1], [0.5, 0.5], LOG_2),
        ("rmse", [1, 2, 3, 4], [1, 2, 3, 6], 1.0),
        ("mcrmse", [1, 2, 3, 4], [1, 2, 3, 6], 1.0),
        ("mse", [1, 2, 3, 4], [1, 2, 3, 8], 4.0),
        ("mae", [1, 2, 3, 4], [1, 2, 3, 6], 0.5),
        ("medae", [1, 2, 3], [1, 3, 9], 1.0),
        ("rmsle", [0, math.e - 1], [0, 0], math.sqrt(0.5)),
        ("smape", [0, 1, 3], [0, 3, 1], 200 / 3),
        ("r2", [1, 2, 3], [1, 2, 2], 0.5),
        ("pearson", [1, 2, 3], [2, 4, 6], 1.0),
        ("spearman", [1, 2, 3], [1, 100, 10], 0.5),
        ("map_at_3", "abc", ["a b c", "a b c", "a b a"], (1 + 1 / 2 + 0) / 3),
        ("jaccard", ["so good", "Bad day"], ["good", "bad day"], 0.75),
    ],
)
def test_every_metric_by_hand(metric, truth, predicted, value, process, tmp_path):
    found = score_columns(answers(metric, truth), process, tmp_path, predicted)
    assert found.valid
    assert found.metrics[metric] == pytest.approx(value)
    assert found.metrics["score"] == found.metrics[metric]


def test_every_metric_is_tried_by_hand():
    (mark,) = test_every_metric_by_hand.pytestmark
    assert {case[0] for case in mark.args[1]} == set(METRICS)


def test_usual_metrics_stand_beside_the_declared_one(process, tmp_path):
    regression = score_columns(answers("rmsle", [0, 10, 20, 40]), process, tmp_path, [0, 10, 20, 20])
    assert {k: regression.metrics[k] for k in ("rmse", "mae", "rmse_percent", "mae_percent")} == pytest.approx(
        {"rmse": 10, "mae": 5, "rmse_percent": 25, "mae_percent": 12.5}
    )
    scores = score_columns(answers("roc_auc", [0, 1, 1, 0]), process, tmp_path, [0.2, 0.9, 0.4, 0.5])
    assert scores.metrics == {"roc_auc": 0.75, "normalized_gini": 0.5, "accuracy": 0.5, "f1": 0.5, "score": 0.75}
    labels = score_columns(answers("accuracy", ["no", "yes", "no"]), process, tmp_path, ["no", "yes", "yes"])
    assert labels.metrics == pytest.approx({"accuracy": 2 / 3, "f1": 2 / 3, "roc_auc": 0.75, "score": 2 / 3})


def test_scores_that_are_no_probabilities_have_no_accuracy(process, tmp_path):
    found = score_columns(answers("roc_auc", [0, 1]), process, tmp_path, [-7, 12])
    assert found.metrics == {"roc_auc": 1.0, "normalized_gini": 1.0, "score": 1.0}


def test_several_targets_are_means_over_columns(process, tmp_path):
    found = score_columns(answers("mcrmse", [0, 4], [0, 40]), process, tmp_path, [0, 4], [40, 0])
    assert found.metrics["score"] == 20
    assert found.metrics["rmse_percent"] == 50
    # One class alone has no area under its curve, and is left out of the mean.
    auc = score_columns(answers("roc_auc", [0, 1], [0, 0]), process, tmp_path, [0.1, 0.9], [0.3, 0.4])
    assert auc.metrics["score"] == 1.0
    alone = score_columns(answers("roc_auc", [0, 0]), process, tmp_path, [0.1, 0.9])
    assert alone.valid
    assert "score" not in alone.metrics


def test_log_loss_over_several_columns_takes_them_as_classes(process, tmp_path):
    truth = answers("log_loss", [1, 0], [0, 0], [0, 1])
    found = score_columns(truth, process, tmp_path, [0.2, 0.2], [0.1, 0.2], [0.1, 0.4])
    # Rows are brought to a sum of 1: both give the right class a half.
    assert found.metrics["score"] == pytest.approx(LOG_2)
    assert found.metrics["accuracy"] == 1.0
    empty = score_columns(truth, process, tmp_path, [0, 1], [0, 0], [0, 0])
    assert empty.fault == "not_a_probability"
    with pytest.raises(ConfigError, match="one 1"):
        answers("log_loss", [1, 1], [1, 0])


def test_a_constant_truth_has_percentages(process, tmp_path):
    truth = answers("rmse", [5, 5])
    assert score_columns(truth, process, tmp_path, [5, 5]).metrics["rmse_percent"] == 0
    assert score_columns(truth, process, tmp_path, [5, 6]).metrics["rmse_percent"] == 100
    assert chance_level(truth) == {"mae_percent": 0, "rmse_percent": 0}


# -- the scoring mistakes of the reference code -------------------------------------------------------------------


def test_perfect_predictions_in_another_row_order_are_perfect(process, tmp_path):
    truth = answers("accuracy", [0, 1, 0, 1])
    text = text_of(("id", "y0"), [(4, 1), (3, 0), (2, 1), (1, 0)])
    assert score_text(text, truth, process, tmp_path).metrics["accuracy"] == 1.0


def test_one_right_row_alone_fails(process, tmp_path):
    found = score_text(text_of(("id", "y0"), [(1, 0)]), answers("accuracy", [0, 1, 0, 1]), process, tmp_path)
    assert (found.fault, found.metrics) == ("missing_id", {})
    assert found.detail == "3 of 4 ids are missing, the first is '2'"


def test_text_labels_are_scored(process, tmp_path):
    truth = answers("f1_macro", ["setosa", "virginica", "versicolor"])
    assert score_columns(truth, process, tmp_path, ["setosa", "virginica", "versicolor"]).metrics["score"] == 1.0


def test_every_target_counts_and_columns_go_by_name(process, tmp_path):
    truth = answers("mae", [1, 2], [10, 20])
    text = text_of(("y1", "id", "y0"), [(10, 1, 1), (20, 2, 4)])
    assert score_text(text, truth, process, tmp_path).metrics["mae"] == 0.5


def test_a_probability_is_no_class(process, tmp_path):
    found = score_columns(answers("accuracy", [0, 1]), process, tmp_path, [0.2, 0.8])
    assert found.fault == "unknown_label"


def test_few_different_numbers_are_still_numbers(process, tmp_path):
    found = score_columns(answers("rmse", [0, 1, 0, 1]), process, tmp_path, [0, 1, 0, 1])
    assert "rmse" in found.metrics
    assert "accuracy" not in found.metrics


# -- reasons to refuse --------------------------------------------------------------------------------------------

ROWS = [(1, 10), (2, 20), (3, 30)]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (text_of(("id", "y0"), ROWS[:2]), "missing_id"),
        (text_of(("id", "y0"), [*ROWS, (4, 1)]), "extra_id"),
        (text_of(("id", "y0"), [*ROWS[:2], (4, 1)]), "missing_id"),
        (text_of(("id", "y0"), [*ROWS, ROWS[0]]), "duplicate_key"),
        (text_of(("id", "y0"), [*ROWS, ("1.0", 10)]), "duplicate_key"),
        (text_of(("id", "y0"), [*ROWS[:2], (3, "nan")]), "not_finite"),
        (text_of(("id", "y0"), [*ROWS[:2], (3, "-inf")]), "not_finite"),
        (text_of(("id", "y0"), [*ROWS[:2], (3, "")]), "empty_cell"),
        (text_of(("id", "y0"), [*ROWS[:2], (3, "high")]), "not_a_number"),
        (text_of(("id", "y0"), [*ROWS[:2], (3, "True")]), "boolean"),
        (text_of(("id", "y0"), [*ROWS[:2], (3, "1e200")]), "out_of_range"),
        (text_of(("id", "y0"), [*ROWS[:2], (3, -1)]), "out_of_range"),
        (text_of(("id", "y"), ROWS), "missing_column"),
        (text_of(("", "id", "y0"), [(0, *row) for row in ROWS]), "extra_column"),
        (text_of(("id", "y0"), []), "no_rows"),
        ("", "empty"),
        (text_of(("id", "y0"), ROWS).replace(",", ";"), "separator"),
    ],
)
def test_what_is_refused_and_why(text: str, fault: str, process, tmp_path):
    found = score_text(text, answers("rmsle", [10, 20, 30]), process, tmp_path)
    assert (found.valid, found.fault, found.metrics) == (False, fault, {})
    assert found.detail.isprintable()
    assert found.detail


def test_refused_classes_and_probabilities(process, tmp_path):
    assert score_columns(answers("accuracy", "ab"), process, tmp_path, ["a", "c"]).fault == "unknown_label"
    assert score_columns(answers("accuracy", "ab", train=["abc"]), process, tmp_path, ["a", "c"]).valid
    assert score_columns(answers("map_at_3", "ab"), process, tmp_path, ["a b", " "]).fault == "empty_cell"
    assert score_columns(answers("map_at_3", "ab"), process, tmp_path, ["a b", "x"]).fault == "unknown_label"
    assert score_columns(answers("log_loss", [0, 1]), process, tmp_path, [0, 1.5]).fault == "not_a_probability"


def test_a_missing_file_is_refused(process, tmp_path):
    from lightning_mappa.tables.scoring import score
    from lightning_mappa.tasks.grading_process import read_csv

    truth = answers("rmse", [1, 2])
    assert score(read_csv(tmp_path / "none.csv", truth.columns), truth, process).fault == "missing"


def test_ids_that_are_equal_as_numbers_are_told_apart_where_the_task_has_both(process, tmp_path):
    truth = answers("accuracy", "ab", ids=["07", "7"])
    assert score_text("id,y0\n7,b\n07,a\n", truth, process, tmp_path).metrics["accuracy"] == 1.0
    assert score_text("id,y0\n7.0,b\n07,a\n", truth, process, tmp_path).fault == "missing_id"


@pytest.mark.parametrize(
    ("metric", "column", "ids", "match"),
    [
        ("rmse", [1, "x"], None, "no number"),
        ("rmse", [1, "nan"], None, "no number"),
        ("rmse", [1, 2], [1, 1], "the same id"),
        ("roc_auc", "abc", None, "two classes"),
        ("auc", [1, 2], None, "metric=auc: allowed are accuracy"),
    ],
)
def test_a_task_that_cannot_be_scored_is_a_mistake_of_its_owner(metric, column, ids, match):
    with pytest.raises(ConfigError, match=match):
        answers(metric, column, ids=ids)


def test_a_spec_names_every_column_once():
    with pytest.raises(ConfigError, match="each once"):
        TableSpec(id_column="id", targets=("id",), metric="rmse")


# -- what never changes a score ---------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    metric=st.sampled_from(["accuracy", "roc_auc", "rmse", "mcrmse", "f1_macro", "spearman"]),
    n=st.integers(3, 8),
    seed=st.integers(0, 10**6),
)
def test_order_id_type_and_line_ends_never_change_a_score(data, metric, n, seed, process, tmp_path):
    rng = random.Random(seed)
    two = metric in ("mcrmse", "rmse")
    values = ["no", "yes", "may be"] if metric in ("accuracy", "f1_macro") else [0, 1]
    draw = (lambda: rng.choice(values)) if metric != "spearman" and not two else (lambda: rng.randint(-9, 9))
    ids = rng.sample(range(1000), n)
    columns = [[draw() for _ in range(n)] for _ in range(1 + two)]
    truth = answers(metric, *columns, ids=ids, train=[list(map(str, values))] * (1 + two))
    rows = [[i, *(draw() for _ in range(1 + two))] for i in ids]
    plain = score_text(text_of(truth.table.columns, rows), truth, process, tmp_path)

    shuffled = data.draw(st.permutations(rows))
    places = data.draw(st.permutations(range(2 + two)))
    spelt = data.draw(st.sampled_from(["{}", "{}.0", "{:05d}", "{}e0", '"{}"']))
    cells = [[spelt.format(row[0]), *row[1:]] for row in shuffled]
    header = [truth.table.columns[place] for place in places]
    end = data.draw(st.sampled_from(["\n", "\r\n"]))
    text = text_of(header, [[row[place] for place in places] for row in cells], end)
    other = score_text(text, truth, process, tmp_path)
    assert plain.valid
    assert other == plain
