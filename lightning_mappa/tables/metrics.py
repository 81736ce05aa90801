"""Metrics of predictions against the truth, from scikit-learn where it has them.

The text of this module also runs on its own, without this package, in the process of `metric_process`. Rows of
truth and predictions belong together already; nothing here reads files.
"""

import json
import math
import sys
from typing import Any

Numbers = list[float]
Found = dict[str, float]


def measure(
    form: str, metric: str, truth: list[list[Any]], predicted: list[list[Any]], labels: "list[list[str]]"
) -> Found:
    """The metric under its name and as `score`, and beside it what is usual for its kind; undefined ones left out.

    Args:
        form: a `spec.Form`.
        truth: per target a column; places in `labels` where the form has classes, else numbers or texts.
        predicted: as `truth`; numbers for scores and probabilities; texts for ranked classes, which are indices
            separated by spaces.
        labels: per target the classes in order; the last is the positive one where there are two.
    """
    columns = list(zip(truth, predicted, labels, strict=True))
    if form == "number":
        found = _mean([_regression(metric, t, p) for t, p, _ in columns])
    elif form == "label":
        found = _mean([_labels(metric, t, p, known) for t, p, known in columns])
    elif form == "score":
        found = _mean([_scores(t, p) for t, p, _ in columns])
    elif form == "probability":
        found = _probabilities(truth, predicted)
    elif form == "ranked":
        found = _mean([_ranked(t, p) for t, p, _ in columns])
    else:
        found = {"jaccard": _average([_jaccard(a, b) for t, p, _ in columns for a, b in zip(t, p, strict=True)])}
    if metric in found:
        found["score"] = found[metric]
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _mean(columns: list[Found]) -> Found:
    """Over the columns for which a metric is defined."""
    names = {name: None for column in columns for name in column}
    return {name: _average([c[name] for c in columns if math.isfinite(c.get(name, math.nan))]) for name in names}


def _average(values: Numbers) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _regression(metric: str, truth: Numbers, predicted: Numbers) -> Found:
    from sklearn import metrics as m

    mse = float(m.mean_squared_error(truth, predicted))
    found = {"rmse": math.sqrt(mse), "mae": float(m.mean_absolute_error(truth, predicted))}
    spread = max(truth) - min(truth)
    for name in ("rmse", "mae"):
        exact = 0.0 if found[name] == 0 else 100.0
        found[f"{name}_percent"] = 100 * found[name] / spread if spread else exact
    if metric == "mse":
        found["mse"] = mse
    elif metric == "mcrmse":
        found["mcrmse"] = found["rmse"]
    elif metric == "medae":
        found["medae"] = float(m.median_absolute_error(truth, predicted))
    elif metric == "rmsle":
        found["rmsle"] = float(m.root_mean_squared_log_error(truth, predicted))
    elif metric == "r2":
        found["r2"] = float(m.r2_score(truth, predicted)) if len(truth) > 1 else math.nan
    elif metric == "smape":
        found["smape"] = _average([_smape(t, p) for t, p in zip(truth, predicted, strict=True)])
    elif metric in ("pearson", "spearman"):
        found[metric] = _correlation(metric, truth, predicted)
    return found


def _smape(truth: float, predicted: float) -> float:
    """In percent, 0 … 200."""
    size = abs(truth) + abs(predicted)
    return 200 * abs(truth - predicted) / size if size else 0.0


def _correlation(name: str, truth: Numbers, predicted: Numbers) -> float:
    from scipy import stats

    if len(set(truth)) < 2 or len(set(predicted)) < 2:
        return math.nan
    function = stats.pearsonr if name == "pearson" else stats.spearmanr
    return float(function(truth, predicted).statistic)


def _labels(metric: str, truth: list[int], predicted: list[int], labels: "list[str]") -> Found:
    from sklearn import metrics as m

    known = list(range(len(labels)))
    binary = len(labels) == 2

    def f1(average: str) -> float:
        # The mean over classes that are there, in truth or prediction, as scikit-learn has it by itself.
        there = sorted({*truth, *predicted})
        return float(m.f1_score(truth, predicted, labels=there, average=average, zero_division=0.0))

    def binary_f1() -> float:
        return float(m.f1_score(truth, predicted, pos_label=1, average="binary", zero_division=0.0))

    found = {
        "accuracy": float(m.accuracy_score(truth, predicted)),
        "f1": binary_f1() if binary else f1("weighted"),
    }
    if binary:
        found["roc_auc"] = _auc(truth, [float(p) for p in predicted])
    if metric.startswith("f1_"):
        found[metric] = f1(metric.removeprefix("f1_"))
    elif metric == "mcc":
        found["mcc"] = float(m.matthews_corrcoef(truth, predicted))
    elif metric == "quadratic_weighted_kappa":
        found[metric] = _kappa(truth, predicted, labels, known)
    return found


def _kappa(truth: list[int], predicted: list[int], labels: "list[str]", known: list[int]) -> float:
    """Distances are those of the labels where they are whole numbers, else of their places."""
    from sklearn import metrics as m

    if truth == predicted:
        return 1.0
    values = [float(label) for label in labels] if all(_is_number(label) for label in labels) else []
    if values and all(value.is_integer() for value in values) and values[-1] - values[0] <= 1000:
        truth, predicted = [int(values[t]) for t in truth], [int(values[p]) for p in predicted]
        known = list(range(int(values[0]), int(values[-1]) + 1))
    return float(m.cohen_kappa_score(truth, predicted, labels=known, weights="quadratic"))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _scores(truth: list[int], predicted: Numbers) -> Found:
    auc = _auc(truth, predicted)
    found = {"roc_auc": auc, "normalized_gini": 2 * auc - 1}
    if all(0 <= p <= 1 for p in predicted):
        found |= _at_one_half(truth, predicted)
    return found


def _at_one_half(truth: list[int], predicted: Numbers) -> Found:
    from sklearn import metrics as m

    called = [int(p >= 0.5) for p in predicted]
    return {
        "accuracy": float(m.accuracy_score(truth, called)),
        "f1": float(m.f1_score(truth, called, zero_division=0.0)),
    }


def _auc(truth: list[int], predicted: Numbers) -> float:
    from sklearn import metrics as m

    return float(m.roc_auc_score(truth, predicted)) if len(set(truth)) == 2 else math.nan


def _probabilities(truth: list[list[int]], predicted: list[Numbers]) -> Found:
    """One column: the positive class. Several: each a class, of which one is 1 in every row of the truth."""
    from sklearn import metrics as m

    if len(truth) == 1:
        return {"log_loss": float(m.log_loss(truth[0], predicted[0], labels=[0, 1])), **_scores(truth[0], predicted[0])}
    rows = [[p / math.fsum(row) for p in row] for row in zip(*predicted, strict=True)]
    right = [row.index(1) for row in zip(*truth, strict=True)]
    called = [row.index(max(row)) for row in rows]
    known = list(range(len(truth)))
    return {
        "log_loss": float(m.log_loss(right, rows, labels=known)),
        "accuracy": float(m.accuracy_score(right, called)),
        "f1": float(m.f1_score(right, called, average="weighted", zero_division=0.0)),
    }


def _ranked(truth: list[int], predicted: "list[str]") -> Found:
    from sklearn import metrics as m

    ranks = [[int(place) for place in cell.split()][:3] for cell in predicted]
    hits = [1 / (rank.index(t) + 1) if t in rank else 0.0 for t, rank in zip(truth, ranks, strict=True)]
    first = [rank[0] for rank in ranks]
    return {
        "map_at_3": _average(hits),
        "accuracy": float(m.accuracy_score(truth, first)),
        "f1": float(m.f1_score(truth, first, average="weighted", zero_division=0.0)),
    }


def _jaccard(truth: str, predicted: str) -> float:
    """Of the two sets of words, in lower case."""
    a, b = set(truth.lower().split()), set(predicted.lower().split())
    return len(a & b) / len(a | b) if a | b else 1.0


def _main() -> None:
    """A JSON object of arguments per line in, one of metrics per line out; first one line when all is imported."""
    import warnings

    import scipy.stats
    import sklearn.metrics

    warnings.simplefilter("ignore")
    print(json.dumps({"sklearn": sklearn.__version__, "scipy": scipy.__version__}), flush=True)
    for line in sys.stdin:
        try:
            reply: dict[str, Any] = {"metrics": measure(**json.loads(line))}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    _main()
