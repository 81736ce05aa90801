"""Mean and standard deviation of returns, from what crosses between ranks: sums per action, not tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """`count` values offset − kl_coef · s_t, known by the sums of s_t and s_t² over them."""

    offset: float
    count: int = 1
    kl_coef: float = 0.0
    suffix_kl_sum: float = 0.0
    suffix_kl_sq_sum: float = 0.0

    def sum(self) -> float:
        return self.count * self.offset - self.kl_coef * self.suffix_kl_sum

    def squared_distance(self, mean: float) -> float:
        """Sum of (value − mean)²."""
        distance = self.offset - mean
        return (
            self.count * distance * distance
            - 2.0 * distance * self.kl_coef * self.suffix_kl_sum
            + self.kl_coef * self.kl_coef * self.suffix_kl_sq_sum
        )


def mean_and_std(terms: Sequence[Term]) -> tuple[float, float]:
    """Population moments in two passes; (0, 0) when there is no value."""
    count = sum(term.count for term in terms)
    if count == 0:
        return 0.0, 0.0
    mean = total(term.sum() for term in terms) / count
    variance = total(term.squared_distance(mean) for term in terms) / count
    return mean, math.sqrt(max(variance, 0.0))


def total(values: Iterable[float]) -> float:
    """The sum, rounded once, so that the order of episodes cannot matter; nan where it has no value.

    A nan then reaches the loss, where a non-finite step is skipped and counted.
    """
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return math.nan
