import pytest

from lightning_mappa.algorithm.rewards import action_reward
from lightning_mappa.errors import ConfigError


@pytest.mark.parametrize(
    ("score", "outcome", "mode", "expected"),
    [
        (7.0, None, "process", 0.7),
        (0.0, 1.0, "process", 0.0),
        (None, 1.0, "process", None),
        (None, 1.0, "outcome", 1.0),
        (7.0, 0.0, "outcome", 0.0),
        (7.0, None, "outcome", None),
        (7.0, 1.0, "mix", 0.6 * 0.7 + 0.4),
        (0.0, 0.0, "mix", 0.0),
        (None, 1.0, "mix", None),
        (7.0, None, "mix", None),
    ],
)
def test_reward_of_each_mode(score, outcome, mode, expected):
    reward = action_reward(score, outcome, mode=mode, process_weight=0.6, outcome_weight=0.4)
    assert reward == (None if expected is None else pytest.approx(expected, abs=1e-15))


def test_mix_does_not_need_a_part_of_weight_zero():
    assert action_reward(7.0, None, mode="mix", process_weight=1.0, outcome_weight=0.0) == 0.7
    assert action_reward(None, 0.5, mode="mix", process_weight=0.0, outcome_weight=2.0) == 1.0


def test_unknown_mode():
    with pytest.raises(ConfigError, match=r"algorithm.reward is 'score'; allowed: process, outcome, mix"):
        action_reward(7.0, 1.0, mode="score")
