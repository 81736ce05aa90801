"""The KL divergence to the reference policy: estimators, where each may stand, and its coefficient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_mappa.algorithm.choices import check_choice
from lightning_mappa.errors import ConfigError, NumericError

KL_ESTIMATORS = ("k1", "k2", "k3")
KL_PLACEMENTS = ("reward", "loss")

_REFUSED = {
    ("k1", "loss"): "its gradient is zero in expectation, so it holds nothing back",
    ("k2", "reward"): "its gradient there is not that of the KL divergence",
    ("k3", "loss"): "its gradient is that of the forward KL divergence",
    ("k3", "reward"): "its gradient there is that of neither KL divergence",
}

_MAX_ERROR = 0.2


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(policy ‖ reference) on tokens that the policy sampled; any shape, kept.

    With d = log pi − log pi_ref: k1 = d, k2 = d² / 2, k3 = exp(−d) − 1 + d. Nothing is clamped, so that a
    divergence shows. The mean of k1 and of k3 is the KL itself, that of k2 is not. Both inputs must be
    float32 or wider and at the same temperature. Raises `ConfigError` for another estimator.
    """
    check_choice("kl_estimator", estimator, KL_ESTIMATORS)
    difference = log_probs - ref_log_probs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return torch.expm1(-difference) + difference


def check_kl_placement(estimator: str, placement: str) -> None:
    """Lets pass what gives the gradient of the reverse KL: k1 in the reward (detached), or k2 as a loss.

    Raises `ConfigError`, with the reason, for every other pair.
    """
    check_choice("kl_estimator", estimator, KL_ESTIMATORS)
    check_choice("kl_placement", placement, KL_PLACEMENTS)
    reason = _REFUSED.get((estimator, placement))
    if reason is not None:
        raise ConfigError(
            f"kl_estimator={estimator} with kl_placement={placement} is refused: {reason}; "
            "allowed: k1 with reward, k2 with loss"
        )


class KLController(Protocol):
    """Holds beta, the weight of the KL penalty, from step to step."""

    @property
    def coef(self) -> float: ...

    def update(self, kl: float, n_steps: int) -> None:
        """kl: the step's mean over sampled tokens; n_steps: how far to move, in the unit of the horizon."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class FixedKLController:
    """The same coefficient in every step. Raises `ConfigError` for a negative one."""

    def __init__(self, coef: float) -> None:
        self.coef = _bounded("kl_coef", coef, zero=True)

    def update(self, kl: float, n_steps: int) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.coef = float(state["coef"])


class AdaptiveKLController:
    """Moves the coefficient towards the one at which the KL is `target` (Ziegler et al., arXiv 1909.08593).

    Each update multiplies by 1 + clip(kl / target − 1, ±0.2) · n_steps / horizon; one update goes at most one
    horizon, so the coefficient stays positive. Raises `ConfigError` unless all three are above 0 and finite.
    """

    def __init__(self, coef: float, target: float, horizon: float) -> None:
        self.coef = _bounded("kl_coef", coef)
        self.target = _bounded("kl_target", target)
        self.horizon = _bounded("kl_horizon", horizon)

    def update(self, kl: float, n_steps: int) -> None:
        """Raises `NumericError` when the KL is not a number."""
        if math.isnan(kl):
            raise NumericError("the KL to the reference is not a number, the KL coefficient cannot follow it")
        error = min(max(kl / self.target - 1.0, -_MAX_ERROR), _MAX_ERROR)
        self.coef *= 1.0 + error * min(n_steps / self.horizon, 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.coef = float(state["coef"])


def _bounded(key: str, value: float, *, zero: bool = False) -> float:
    if not math.isfinite(value) or value < 0.0 or (value == 0.0 and not zero):
        raise ConfigError(f"{key} is {value}; allowed: a finite number {'of at least' if zero else 'above'} 0")
    return float(value)
