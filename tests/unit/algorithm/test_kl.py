"""Values and gradients of the KL estimators, against exact expectations over three classes."""

import math

import pytest
import torch

from lightning_mappa.algorithm.kl import (
    AdaptiveKLController,
    FixedKLController,
    check_kl_placement,
    kl_estimate,
)
from lightning_mappa.errors import ConfigError, NumericError

LOGITS = [1.0, 0.0, -1.0]
REF_LOG_PROBS = torch.tensor([0.0, 0.5, 0.0], dtype=torch.float64).log_softmax(0)

REVERSE = [0.36399, -0.23319, -0.13080]
FORWARD = [0.39117, -0.20713, -0.18404]
NEITHER = [-0.02718, -0.02605, 0.05324]
NOTHING = [0.0, 0.0, 0.0]


def gradient(estimator, placement):
    """Of the expected loss, each class weighted by its probability of being sampled."""
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    log_probs = logits.log_softmax(0)
    sampled = log_probs.exp().detach()
    values = kl_estimate(log_probs, REF_LOG_PROBS, estimator)
    loss = (sampled * (values if placement == "loss" else values.detach() * log_probs)).sum()
    loss.backward()
    return logits.grad.tolist()


@pytest.mark.parametrize(
    ("estimator", "placement", "expected"),
    [
        ("k1", "reward", REVERSE),
        ("k2", "loss", REVERSE),
        ("k1", "loss", NOTHING),
        ("k3", "loss", FORWARD),
        ("k3", "reward", NEITHER),
    ],
)
def test_gradient_of_each_placement(estimator, placement, expected):
    assert gradient(estimator, placement) == pytest.approx(expected, abs=1e-5)


def test_reverse_and_forward_are_the_gradients_of_the_exact_divergences():
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    log_probs = logits.log_softmax(0)
    reverse = (log_probs.exp() * (log_probs - REF_LOG_PROBS)).sum()
    forward = (REF_LOG_PROBS.exp() * (REF_LOG_PROBS - log_probs)).sum()
    for divergence, expected in ((reverse, REVERSE), (forward, FORWARD)):
        (grad,) = torch.autograd.grad(divergence, logits, retain_graph=True)
        assert grad.tolist() == pytest.approx(expected, abs=1e-5)


def test_k2_in_the_reward_has_another_gradient_than_the_divergence():
    assert gradient("k2", "reward") != pytest.approx(REVERSE, abs=0.02)
    assert gradient("k2", "reward") != pytest.approx(FORWARD, abs=0.02)


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.33962), ("k2", 0.36336), ("k3", 0.33962)])
def test_expected_value_of_each_estimator(estimator, expected):
    log_probs = torch.tensor(LOGITS, dtype=torch.float64).log_softmax(0)
    value = (log_probs.exp() * kl_estimate(log_probs, REF_LOG_PROBS, estimator)).sum().item()
    assert value == pytest.approx(expected, abs=1e-5)


def test_sign_and_direction():
    log_probs = torch.tensor(LOGITS, dtype=torch.float64).log_softmax(0)
    own, other = log_probs.exp(), REF_LOG_PROBS.exp()
    assert (own * kl_estimate(log_probs, REF_LOG_PROBS, "k1")).sum() > 0
    assert (other * kl_estimate(REF_LOG_PROBS, log_probs, "k1")).sum() > 0
    assert (own * kl_estimate(REF_LOG_PROBS, log_probs, "k1")).sum() < 0


def test_a_large_log_ratio_is_not_hidden():
    value = kl_estimate(torch.tensor([0.0]), torch.tensor([-30.0]), "k1")
    assert value.tolist() == [30.0]


def test_unknown_estimator():
    with pytest.raises(ConfigError, match="kl_estimator is 'k4'; allowed: k1, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
    with pytest.raises(ConfigError, match="kl_placement is 'advantage'; allowed: reward, loss"):
        check_kl_placement("k1", "advantage")


def test_placements_with_the_right_gradient_pass():
    check_kl_placement("k1", "reward")
    check_kl_placement("k2", "loss")


@pytest.mark.parametrize(
    ("estimator", "placement", "reason"),
    [
        ("k1", "loss", "gradient is zero"),
        ("k2", "reward", "not that of the KL"),
        ("k3", "loss", "forward KL"),
        ("k3", "reward", "neither"),
    ],
)
def test_wrong_placements_are_refused_by_name(estimator, placement, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        check_kl_placement(estimator, placement)
    assert f"kl_estimator={estimator} with kl_placement={placement}" in str(caught.value)
    assert "k1 with reward, k2 with loss" in str(caught.value)


def test_fixed_controller_stays():
    controller = FixedKLController(0.01)
    controller.update(5.0, 64)
    assert controller.coef == 0.01
    assert FixedKLController(0.0).coef == 0.0


@pytest.mark.parametrize(
    ("kl", "n_steps", "factor"),
    [
        (0.11, 64, 1 + 0.1 * 0.64),
        (0.09, 64, 1 - 0.1 * 0.64),
        (9.0, 50, 1 + 0.2 * 0.5),
        (-9.0, 50, 1 - 0.2 * 0.5),
        (0.1, 100, 1.0),
        (9.0, 1000, 1.2),
        (-9.0, 100_000, 0.8),
    ],
)
def test_adaptive_controller_moves_towards_the_target(kl, n_steps, factor):
    controller = AdaptiveKLController(0.01, target=0.1, horizon=100)
    controller.update(kl, n_steps)
    assert controller.coef == pytest.approx(0.01 * factor, rel=1e-12)


@pytest.mark.parametrize(
    "make", [lambda: FixedKLController(0.01), lambda: AdaptiveKLController(0.01, target=0.1, horizon=100)]
)
def test_controller_state_comes_back(make):
    first, second = make(), make()
    first.update(0.5, 50)
    first.load_state_dict(first.state_dict() | {"coef": 0.0125})
    second.load_state_dict(first.state_dict())
    assert second.coef == 0.0125
    first.update(0.5, 50)
    second.update(0.5, 50)
    assert second.coef == first.coef


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: FixedKLController(-0.1), "kl_coef"),
        (lambda: FixedKLController(math.nan), "kl_coef"),
        (lambda: AdaptiveKLController(0.0, 0.1, 100), "kl_coef"),
        (lambda: AdaptiveKLController(0.01, 0.0, 100), "kl_target"),
        (lambda: AdaptiveKLController(0.01, 0.1, math.inf), "kl_horizon"),
    ],
)
def test_controller_bounds(make, key):
    with pytest.raises(ConfigError, match=f"{key} is .*; allowed: a finite number"):
        make()


def test_adaptive_controller_refuses_a_kl_that_is_no_number():
    with pytest.raises(NumericError):
        AdaptiveKLController(0.01, 0.1, 100).update(math.nan, 1)
