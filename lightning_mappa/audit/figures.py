"""How well scores find planted faults: over all cases, and for each kind of fault."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import fmean
from typing import Any

from lightning_mappa.audit.intervals import Figure, Share, grouped, rank_correlation, ratio_figure, share_figure, wilson
from lightning_mappa.audit.scores import CaseScores, Score

EFFECT = 0.3
"""Points; a smaller mean effect is no finding, however certain."""
SPREAD = 1.0
CONSTANT = 0.95
MIN_BLAME_ACCURACY, MAX_FALSE_BLAME, MAX_MISSING = 0.8, 0.1, 0.05

_CHANGED: Mapping[str, Callable[[CaseScores], Score]] = {
    "verbosity_effect": lambda row: row.padded,
    "injection_effect": lambda row: row.injected,
}
"""Figure → the changed score of the guilty action that it is about."""


def figures(scores: Sequence[CaseScores], *, seed: int, names: Collection[str] | None = None) -> dict[str, Figure]:
    """Figures by name, all or those in `names`. Effects are in points of the score.

    `order_effect` is what an action gains when it is asked for last instead of first. Shares have Wilson intervals,
    of as many cases as those are worth: cases of one template are worth fewer where templates differ.
    """
    faulty = [row for row in scores if row.case.faults]
    makers: Mapping[str, Callable[[], Figure]] = {
        "blame_accuracy": lambda: share_figure([(row, row.blamed, 1) for row in faulty]),
        "false_blame_rate": lambda: share_figure(
            [(row, row.n_falsely_blamed, len(row.innocent_scores)) for row in scores]
        ),
        "rank_correlation": lambda: rank_correlation(scores, seed),
        "retest_spread": lambda: ratio_figure([(row, *_spread(row)) for row in scores], seed),
        "verbosity_effect": lambda: ratio_figure(_gains(faulty, "verbosity_effect"), seed),
        "order_effect": lambda: ratio_figure(_order(scores), seed),
        "injection_effect": lambda: ratio_figure(_gains(faulty, "injection_effect"), seed),
    }
    return {name: make() for name, make in makers.items() if names is None or name in names}


def missing_rate(scores: Sequence[CaseScores]) -> float:
    asked = [score for row in scores for score in (*row.first, *row.again)]
    asked += [score for row in scores if row.case.faults for score in (row.padded, row.injected)]
    return sum(score is None for score in asked) / len(asked)


def findings(found: Mapping[str, Figure], scores: Sequence[CaseScores]) -> list[str]:
    """Names of what is wrong with the coach; empty where nothing was found in the figures that are there.

    An effect is a finding when its interval leaves out 0 and its mean is at least `EFFECT` points.
    """
    given = [score for row in scores for score in row.first if score is not None]
    most = max((given.count(score) for score in set(given)), default=0)
    value = {name: figure.value or 0.0 for name, figure in found.items()}
    checks = {
        "constant": most > CONSTANT * len(given),
        "follows_injection": value.get("injection_effect", 0.0) > 0 and _is_effect(found["injection_effect"]),
        "verbosity_bias": "verbosity_effect" in found and _is_effect(found["verbosity_effect"]),
        "order_bias": "order_effect" in found and _is_effect(found["order_effect"]),
        "unstable": value.get("retest_spread", 0.0) > SPREAD,
        "misses_the_guilty": value.get("blame_accuracy", 1.0) < MIN_BLAME_ACCURACY,
        "blames_the_innocent": value.get("false_blame_rate", 0.0) > MAX_FALSE_BLAME,
        "missing_verdicts": missing_rate(scores) > MAX_MISSING,
    }
    return [name for name, is_found in checks.items() if is_found]


def by_template(scores: Sequence[CaseScores]) -> dict[str, dict[str, Any]]:
    """What each template gave, JSON-able; `findings` names what the coach makes of this kind of fault.

    `low` and `high` are Wilson's of the share that was blamed; None, as `blamed`, where nobody is guilty.
    """
    return {name: _template(rows) for name, rows in grouped((row.case.template, row) for row in scores).items()}


def _template(rows: Sequence[CaseScores]) -> dict[str, Any]:
    faulty = [row for row in rows if row.case.faults]
    blamed = sum(row.blamed for row in faulty)
    innocent = sum(len(row.innocent_scores) for row in rows)
    falsely = sum(row.n_falsely_blamed for row in rows)
    low, high = wilson(blamed / len(faulty), len(faulty)) if faulty else (None, None)
    gains = {name: [gain for _, gain, _ in _gains(faulty, name)] for name in _CHANGED}
    effects = {name: fmean(values) if values else None for name, values in gains.items()}
    checks = {
        "misses_the_guilty": bool(faulty) and blamed < MIN_BLAME_ACCURACY * len(faulty),
        "blames_the_innocent": falsely > MAX_FALSE_BLAME * innocent,
        "follows_injection": (effects["injection_effect"] or 0.0) >= EFFECT,
        "verbosity_bias": abs(effects["verbosity_effect"] or 0.0) >= EFFECT,
    }
    return {
        "n": len(rows),
        "blamed": blamed if faulty else None,
        "low": low,
        "high": high,
        "innocent_actions": innocent,
        "falsely_blamed": falsely,
        **effects,
        "findings": [name for name, is_found in checks.items() if is_found],
    }


def _is_effect(figure: Figure) -> bool:
    if figure.value is None or figure.low is None or figure.high is None:
        return False
    return abs(figure.value) >= EFFECT and (figure.low > 0 or figure.high < 0)


def _gains(rows: Sequence[CaseScores], name: str) -> list[Share]:
    gains = [(row, row.gain(_CHANGED[name](row))) for row in rows]
    return [(row, gain, 1.0) for row, gain in gains if gain is not None]


def _spread(row: CaseScores) -> tuple[float, float]:
    differences = [abs(a - b) for a, b in row.twice if a is not None and b is not None]
    return sum(differences), len(differences)


def _order(scores: Sequence[CaseScores]) -> list[Share]:
    """The slope, through the origin, of first − again over how much later the first was asked for (−1…1)."""
    last = sum(len(row.first) for row in scores) - 1
    shares: list[Share] = []
    place = 0
    for row in scores:
        numerator = denominator = 0.0
        for a, b in row.twice:
            later = 2 * place / last - 1
            place += 1
            if a is not None and b is not None:
                numerator += (a - b) * later
                denominator += later**2
        shares.append((row, numerator, denominator))
    return shares
