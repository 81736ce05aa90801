"""What must hold for every batch, and the numerical traps of returns and statistics."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_mappa.algorithm.advantages import CreditSettings, action_stats, credit, suffix_kl
from lightning_mappa.errors import ConfigError, NotAvailableError
from lightning_mappa.types import MaskReason

from .example import advantages, example_rows, per_token, row, settings, stats_of

floats = st.floats(-2.0, 2.0, allow_nan=False).map(lambda x: round(x, 3))
actions = st.tuples(
    st.sampled_from(["A", "B", "C"]),
    st.one_of(st.none(), st.floats(0.0, 1.0).map(lambda x: round(x, 2))),
    st.lists(floats, min_size=1, max_size=4),
    st.sampled_from([None, None, None, MaskReason.TRUNCATED]),
)
episodes = st.lists(st.lists(actions, max_size=5), min_size=1, max_size=5)
every_setting = st.builds(
    CreditSettings,
    return_scope=st.sampled_from(["trajectory", "agent", "action"]),
    return_level=st.sampled_from(["action", "token"]),
    return_agg=st.sampled_from(["sum", "mean"]),
    baseline=st.sampled_from(["none", "agent_turn"]),
    norm_scope=st.sampled_from(["all", "agent"]),
    norm_unit=st.sampled_from(["action", "token"]),
)


def batch(drawn, prefix="E"):
    """Rows and the KL of every token by key; an agent's turn is its count so far in the episode."""
    rows, kls = [], {}
    for number, episode in enumerate(drawn):
        turns = dict.fromkeys("ABC", 0)
        for index, (agent, reward, kl, masked) in enumerate(episode):
            rows.append(row(f"{prefix}{number}", index, agent, turns[agent], reward, kl, masked=masked))
            kls[rows[-1].key] = kl
            turns[agent] += 1
    return rows, kls


@given(episodes, every_setting, st.randoms(use_true_random=False))
def test_order_of_episodes_changes_nothing(drawn, chosen, random):
    rows, _ = batch(drawn)
    groups = [[item for item in rows if item.key[0] == f"E{n}"] for n in range(len(drawn))]
    random.shuffle(groups)
    assert credit([item for group in groups for item in group], chosen) == credit(rows, chosen)


@given(episodes, every_setting)
def test_repeating_the_batch_changes_nothing(drawn, chosen):
    rows, _ = batch(drawn)
    once, twice = credit(rows, chosen), credit(rows + batch(drawn, "again")[0], chosen)
    for key, made in once.items():
        assert twice[key].masked == made.masked
        assert twice[key].degenerate == made.degenerate
        assert (twice[key].offset, twice[key].mean, twice[key].std) == pytest.approx(
            (made.offset, made.mean, made.std), abs=1e-12
        )


@given(episodes, every_setting)
def test_merging_agents_only_matters_where_settings_name_the_agent(drawn, chosen):
    rows, _ = batch(drawn)
    chosen = replace(
        chosen,
        norm_scope="all",
        baseline="none",
        return_scope="action" if chosen.return_scope == "agent" else chosen.return_scope,
    )
    merged = [replace(item, agent_id="one", turn=item.key[1]) for item in rows]
    assert credit(merged, chosen) == credit(rows, chosen)


@given(episodes, every_setting)
def test_statistics_equal_those_of_the_tokens_written_out(drawn, chosen):
    rows, kls = batch(drawn)
    made = credit(rows, chosen)
    scopes = {item.agent_id if chosen.norm_scope == "agent" else "" for item in rows}
    for scope in scopes:
        kept = [r for r in rows if scope in ("", r.agent_id) and made[r.key].masked is None]
        if not kept or made[kept[0].key].degenerate:
            continue
        mean, std = made[kept[0].key].mean, made[kept[0].key].std
        if chosen.norm_unit == "token":
            advantages_ = [value for r in kept for value in per_token(made[r.key], kls[r.key])]
        else:
            advantages_ = [per_token(made[r.key], kls[r.key])[0] for r in kept]
        returns = torch.tensor(advantages_, dtype=torch.float64) * (std + 1e-8) + mean
        assert returns.mean().item() == pytest.approx(mean, abs=1e-10)
        assert returns.std(correction=0).item() == pytest.approx(std, abs=1e-7)


@given(episodes, every_setting)
def test_first_token_carries_the_action_return(drawn, chosen):
    rows, kls = batch(drawn)
    tokens = credit(rows, replace(chosen, return_level="token", norm_unit="action"))
    whole = credit(rows, replace(chosen, return_level="action", norm_unit="action"))
    for key in whole:
        assert per_token(tokens[key], kls[key])[0] == pytest.approx(per_token(whole[key], kls[key])[0], abs=1e-5)


@given(episodes, actions)
def test_under_the_default_an_appended_action_changes_no_earlier_return(drawn, extra):
    before = credit(batch(drawn)[0], CreditSettings())
    after = credit(batch([[*drawn[0], extra], *drawn[1:]])[0], CreditSettings())
    for key, made in before.items():
        assert (after[key].masked, after[key].offset) == (made.masked, made.offset)


def test_under_trajectory_scope_an_appended_action_does_change_them():
    rows = [row("E", 0), row("E", 1, "B")]
    assert credit(rows[:1], settings())["E", 0].offset != credit(rows, settings())["E", 0].offset


def test_batch_over_ranks_is_normalised_as_one():
    rewards = [1.0, 2.0, 3.0, 4.0, 10.0, 20.0]
    made = credit([row(f"E{k}", 0, reward=r) for k, r in enumerate(rewards)], settings("action"))
    assert made["E0", 0].mean == pytest.approx(6.667, abs=5e-4)
    assert made["E0", 0].std ** 2 == pytest.approx(43.89, abs=5e-3)


@pytest.mark.parametrize("unit", ["action", "token"])
@pytest.mark.parametrize("level", ["action", "token"])
def test_no_cancellation_far_from_zero(unit, level):
    rows = [row(f"E{k}", 0, reward=1e8 + 0.1 * k) for k in range(3)]
    made = credit(rows, settings("action", unit, return_level=level))
    assert made["E0", 0].std == pytest.approx(math.sqrt(0.02 / 3), rel=1e-6)


def test_population_std_and_not_the_sample_one():
    made = credit(example_rows(), settings())
    assert made["E1", 0].std == pytest.approx(6.2403, abs=5e-5)
    assert made["E1", 0].std != pytest.approx(6.6712, abs=1e-2)
    assert advantages([row("E", 0)], settings("action")) == {("E", 0): 0.0}


@pytest.mark.parametrize("scores", [[7.0, 7.0, 7.0], [7.0, 7.0, 7.0, 7.0 + 5e-7]])
@pytest.mark.parametrize("scope", ["action", "trajectory"])
def test_constant_scores_get_no_advantage_whatever_the_kl(scores, scope):
    rows = [row("E", k, "A", k, score / 10, [0.3 * k, -0.1]) for k, score in enumerate(scores)]
    made = credit(rows, settings(scope, return_level="token"))
    assert all(item.degenerate for item in made.values())
    assert made["E", 0].std > 0.0
    assert per_token(made["E", 1], [0.3, -0.1]) == [0.0, 0.0]


def test_scores_just_above_rounding_are_a_signal():
    rows = [row(f"E{k}", 0, reward=0.7 + 1e-5 * (k == 0)) for k in range(4)]
    values = advantages(rows, settings("action"))
    assert values["E0", 0] == pytest.approx(math.sqrt(3.0), abs=1e-2)


def test_constant_scores_of_one_agent_leave_the_other_alone():
    rows = [
        row("E", 0, "A", 0, 0.7),
        row("E", 1, "A", 1, 0.7),
        row("E", 2, "B", 0, 0.2),
        row("E", 3, "B", 1, 0.4),
    ]
    made = credit(rows, settings("action", norm_scope="agent"))
    assert [item.degenerate for item in made.values()] == [True, True, False, False]


def test_token_and_action_weighted_means_differ():
    means = {unit: credit(example_rows(), settings(unit=unit))["E1", 0].mean for unit in ("action", "token")}
    assert means == pytest.approx({"action": 14.6145, "token": 15.17625}, abs=1e-12)


def test_position_looks_like_merit_under_trajectory_without_a_baseline():
    # 7, 7, 7 in every episode but for a hair, or the batch would be degenerate
    rows = [
        row(f"E{e}", k, agent, 0, 0.7 + (1e-4 if (e, k) == (0, 0) else 0.0))
        for e in range(8)
        for k, agent in enumerate("ABC")
    ]
    plain = advantages(rows, settings())
    assert [plain["E7", k] for k in range(3)] == pytest.approx([1.2247, 0.0, -1.2247], abs=1e-3)
    centred = credit(rows, settings(baseline="agent_turn"))
    assert [centred["E7", k].offset for k in range(3)] == pytest.approx([-1e-4 / 8, 0.0, 0.0], abs=1e-12)


def test_turns_are_paid_for_under_sum_and_not_under_mean():
    rows = [row("one", 0, reward=0.5 + 1e-4)] + [row("four", k, "A", k, 0.5) for k in range(4)]
    summed = advantages(rows, settings())
    assert (summed["one", 0], summed["four", 0]) == pytest.approx((-1.03, 1.54), abs=5e-3)
    means = credit(rows, settings(return_agg="mean"))
    assert means["one", 0].offset > means["four", 0].offset == pytest.approx(0.5, abs=1e-12)


def test_mean_scales_the_kl_of_token_level_returns():
    rows = [row("E", 0, "A", 0, 0.8, [0.2, 0.4]), row("E", 1, "B", 0, 0.2, [0.0])]
    made = credit(rows, settings(return_agg="mean", return_level="token"))["E", 0]
    returns = [value * (made.std + 1e-8) + made.mean for value in per_token(made, [0.2, 0.4])]
    assert returns == pytest.approx([(0.8 - 0.006 + 0.2) / 2, (0.8 - 0.004 + 0.2) / 2], abs=1e-12)


def test_suffix_kl_reads_only_the_mask():
    inf = float("inf")
    kl_BT = torch.tensor([[inf, 0.5, 0.25, -1.0, inf], [inf] * 5], dtype=torch.float32)
    mask_BT = torch.tensor([[0, 1, 1, 1, 0], [0] * 5], dtype=torch.bool)
    s_BT = suffix_kl(kl_BT, mask_BT)
    assert s_BT.dtype is torch.float64
    assert s_BT.tolist() == [[0.0, -0.25, -0.75, -1.0, 0.0], [0.0] * 5]
    first, empty = action_stats(kl_BT, mask_BT)
    assert (first.n_tokens, first.kl_sum, first.suffix_kl_sum) == (3, -0.25, -2.0)
    assert first.suffix_kl_sq_sum == 0.0625 + 0.5625 + 1.0
    assert empty == replace(empty, n_tokens=0, kl_sum=0.0, suffix_kl_sum=0.0, suffix_kl_sq_sum=0.0)
    assert action_stats(kl_BT[:0], mask_BT[:0]) == []


@pytest.mark.parametrize("kls", [[math.nan], [math.inf], [-math.inf]])
def test_non_finite_kl_reaches_the_advantages(kls):
    rows = [
        row("E", 0, reward=0.1),
        row("F", 0, reward=0.9, kls=kls),
        row("G", 0, reward=0.4, kls=[math.inf]),
    ]
    assert all(math.isnan(value) for value in advantages(rows, settings("action")).values())


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("adv_estimator", "gae", "reinforce_plus_plus"),
        ("return_scope", "team", "trajectory, agent, action"),
        ("return_level", "turn", "action, token"),
        ("return_agg", "max", "sum, mean"),
        ("baseline", "critic", "none, agent_turn"),
        ("norm_scope", "rank", "all, agent"),
        ("norm_unit", "word", "action, token"),
    ],
)
def test_unknown_setting_names_key_value_and_what_is_allowed(key, value, allowed):
    with pytest.raises(ConfigError, match=f"algorithm.{key} is '{value}'; allowed: {allowed}$") as caught:
        CreditSettings(**{key: value})
    assert not isinstance(caught.value, NotAvailableError)


@pytest.mark.parametrize("name", ["rloo", "grpo", "reinforce_plus_plus_baseline"])
def test_later_estimators_are_not_available(name):
    with pytest.raises(NotAvailableError, match=f"algorithm.adv_estimator={name} is not available"):
        CreditSettings(adv_estimator=name)
    with pytest.raises(NotAvailableError, match=r"algorithm.gamma=0.99 is not available"):
        CreditSettings(gamma=0.99)


def test_default_settings():
    assert CreditSettings() == CreditSettings(
        adv_estimator="reinforce_plus_plus",
        return_scope="action",
        return_level="action",
        return_agg="sum",
        baseline="none",
        norm_scope="agent",
        norm_unit="action",
    )


def test_stats_of_one_action_by_hand():
    made = stats_of([0.2, -0.1, 0.5])
    assert (made.n_tokens, made.kl_sum) == (3, pytest.approx(0.6))
    assert made.suffix_kl_sum == pytest.approx(0.6 + 0.4 + 0.5)
    assert made.suffix_kl_sq_sum == pytest.approx(0.36 + 0.16 + 0.25)
