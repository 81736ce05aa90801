"""A planted bias goes, what actions did stays, and neither the order of verdicts nor a resume is seen."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from itertools import product
from statistics import fmean

import pytest
from hydra import compose, initialize_config_module

from lightning_mappa.coaches.base import coach_state, load_coach_state, needs_outcome
from lightning_mappa.coaches.stateful import CalibratedCoach, Moments, pooled
from lightning_mappa.errors import ConfigError
from lightning_mappa.testing import ScriptedCoach
from lightning_mappa.types import Episode, Task, Verdict
from tests.unit.factories import make_action

KINDS, ROLES = ("sums", "tables"), ("solver", "verifier")
BIAS = 1.5


def episode(name, kind="sums", roles=ROLES):
    actions = tuple(make_action(agent_id=role, index=index) for index, role in enumerate(roles))
    return Episode(id=name, task=Task(id=name, kind=kind, prompt="?"), actions=actions)


def is_good(shown: Episode, index: int) -> bool:
    return random.Random(f"{shown.id}/{index}").random() < 0.5


def truth(shown: Episode, index: int) -> float:
    """What the coach would say without its bias: good 7, bad 3, the verifier's one less, and noise."""
    noise = random.Random(f"noise {shown.id}/{index}").gauss(0, 0.8)
    return (6.5 if is_good(shown, index) else 3) - (shown.actions[index].role == "verifier") + noise


def biased(shown: Episode, index: int) -> float:
    return min(max(truth(shown, index) + (BIAS if shown.task.kind == "tables" else 0), 0), 10)


def batch(number, size=64):
    return [episode(f"{number}-{i}", KINDS[i % 2]) for i in range(size)]


def play(coach, number, shuffle=None) -> dict[tuple[str, int], Verdict]:
    """One batch, its verdicts side by side and, with `shuffle`, asked for in another order."""
    asked = [(e, index) for e in batch(number) for index in range(len(e.actions))]
    if shuffle is not None:
        random.Random(shuffle).shuffle(asked)

    async def verdicts():
        return await asyncio.gather(*(coach.score(e, index) for e, index in asked))

    keys = [(e.id, index) for e, index in asked]
    given = dict(zip(keys, asyncio.run(verdicts()), strict=True))
    coach.end_of_batch()
    return given


def gaps(numbers, score_of):
    """Mean over role and quality of tables minus sums; of good minus bad in kind and role; of the roles."""
    cells: dict[tuple[str, str, bool], list[float]] = {}
    for number in numbers:
        for e in batch(number):
            for index, action in enumerate(e.actions):
                cells.setdefault((e.task.kind, action.role, is_good(e, index)), []).append(score_of(e, index))
    means = {cell: fmean(scores) for cell, scores in cells.items()}
    kind = fmean(
        means["tables", role, good] - means["sums", role, good] for role, good in product(ROLES, (True, False))
    )
    quality = fmean(means[k, role, True] - means[k, role, False] for k, role in product(KINDS, ROLES))
    role = fmean(means[k, "solver", good] - means[k, "verifier", good] for k, good in product(KINDS, (True, False)))
    return kind, quality, role


def test_a_planted_bias_goes_and_real_differences_stay():
    coach = CalibratedCoach(ScriptedCoach(biased))
    given: dict[tuple[str, int], Verdict] = {}
    for number in range(24):
        given |= play(coach, number)
    late = range(8, 24)
    bias, quality, role = gaps(late, biased)
    true_kind, true_quality, true_role = gaps(late, truth)
    kept_kind, kept_quality, kept_role = gaps(late, lambda e, index: given[e.id, index].score)
    assert bias - true_kind == pytest.approx(BIAS, abs=0.05)
    assert abs(kept_kind - true_kind) < 0.1 * BIAS
    assert kept_quality == pytest.approx(true_quality, rel=0.05)
    assert kept_role == pytest.approx(true_role, abs=0.15)
    assert quality == pytest.approx(true_quality, rel=0.05)
    assert role == pytest.approx(true_role, abs=0.15)


SHARE_GOOD = {"sums": 0.7, "tables": 0.3}


def harder(number, size=64):
    """The tables fail more often in truth: all actions of an episode are good or bad, as its outcome says."""
    shown = [episode(f"harder-{number}-{i}", KINDS[i % 2]) for i in range(size)]
    return [replace(e, outcome=float(random.Random(e.id).random() < SHARE_GOOD[e.task.kind])) for e in shown]


def true_of_harder(shown: Episode, index: int) -> float:
    return (6.5 if shown.outcome else 3) + random.Random(f"noise {shown.id}/{index}").uniform(-1.5, 1.5)


def mean_gap(given):
    """Mean of all scores of tables minus that of sums."""
    return fmean(s for kind, s in given if kind == "tables") - fmean(s for kind, s in given if kind == "sums")


BY_OUTCOME = {"group_by": ["role", "kind", "turn", "outcome"], "within": ["role", "outcome"]}


@pytest.mark.parametrize(("settings", "keeps"), [(BY_OUTCOME, True), ({}, False)])
def test_a_kind_that_fails_more_often_in_truth_keeps_its_lower_scores(settings, keeps):
    """With the outcome in view; without, the planted bias and the real difference go together."""

    def say(shown, index):
        return true_of_harder(shown, index) + (BIAS if shown.task.kind == "tables" else 0)

    coach = CalibratedCoach(ScriptedCoach(say), **settings)
    given, true, raw = [], [], []
    for number in range(24):
        for e in harder(number):
            for index in range(len(e.actions)):
                score = asyncio.run(coach.score(e, index)).score
                if number >= 8:
                    given.append((e.task.kind, score))
                    true.append((e.task.kind, true_of_harder(e, index)))
                    raw.append((e.task.kind, say(e, index)))
        coach.end_of_batch()
    real = mean_gap(true)
    assert real == pytest.approx(-1.4, abs=0.2)
    assert mean_gap(raw) - real == pytest.approx(BIAS)
    if keeps:
        assert mean_gap(given) == pytest.approx(real, abs=0.05)
    else:
        assert abs(mean_gap(given)) < 0.2 * BIAS


@pytest.mark.parametrize(("settings", "waits"), [(BY_OUTCOME, True), ({}, False)])
def test_only_one_that_groups_by_outcome_waits_for_it(settings, waits):
    class Early(ScriptedCoach):
        needs_outcome = False

    coach = CalibratedCoach(Early(truth), **settings)
    assert needs_outcome(coach, episode("e").actions[0], "verifier") is waits


def test_the_packaged_option_groups_by_outcome():
    with initialize_config_module("lightning_mappa.conf", version_base="1.3"):
        node = compose("fit", overrides=["coach=calibrated"]).coach
    assert {key: list(node[key]) for key in BY_OUTCOME} == BY_OUTCOME


def test_without_within_the_roles_are_made_equal_too():
    coach = CalibratedCoach(ScriptedCoach(biased), within=())
    given: dict[tuple[str, int], Verdict] = {}
    for number in range(24):
        given |= play(coach, number)
    kind, _, role = gaps(range(8, 24), lambda e, index: given[e.id, index].score)
    assert abs(role) < 0.2
    assert abs(kind) < 0.2


def test_raw_score_is_what_the_coach_gave():
    coach = CalibratedCoach(ScriptedCoach(biased))
    first = play(coach, 0)
    assert all(verdict.raw_score is None for verdict in first.values())
    second = play(coach, 1)
    for e in batch(1):
        for index in range(2):
            verdict = second[e.id, index]
            assert verdict.raw_score == biased(e, index) != verdict.score
            assert 0 <= verdict.score <= 10
            assert verdict.reason == f"{biased(e, index):g} calibrated to {verdict.score:.2f}: scripted"


def test_order_within_a_batch_is_of_no_matter():
    coaches = [CalibratedCoach(ScriptedCoach(biased)) for _ in range(4)]
    for number in range(4):
        given = [play(coach, number, shuffle) for coach, shuffle in zip(coaches, (None, 1, 2, 3), strict=True)]
        assert given[0] == given[1] == given[2] == given[3]
    assert len({json.dumps(coach.state_dict()) for coach in coaches}) == 1


def test_a_resumed_coach_goes_on_to_the_byte():
    whole = CalibratedCoach(ScriptedCoach(biased))
    for number in range(3):
        play(whole, number)
    saved = json.dumps(coach_state(whole))
    asyncio.run(whole.score(batch(3)[0], 0))
    assert json.dumps(coach_state(whole)) == saved, "a batch that has not ended is not saved"

    straight, resumed = CalibratedCoach(ScriptedCoach(biased)), CalibratedCoach(ScriptedCoach(biased))
    for number in range(3):
        play(straight, number)
    load_coach_state(resumed, json.loads(saved))
    assert play(resumed, 3) == play(straight, 3)
    assert json.dumps(coach_state(resumed)) == json.dumps(coach_state(straight))


def trained(groups, **settings):
    """A coach that has seen the scores of each kind; later it is given what `score` asks."""
    said = {}
    coach = CalibratedCoach(ScriptedCoach(lambda shown, index: said[shown.id]), **settings)

    async def see():
        for kind, scores in groups.items():
            for i, score in enumerate(scores):
                said[f"{kind}-{i}"] = score
                await coach.score(episode(f"{kind}-{i}", kind, ("solver",)), 0)

    asyncio.run(see())
    coach.end_of_batch()

    def score(kind, value):
        said["asked"] = value
        return asyncio.run(coach.score(episode("asked", kind, ("solver",)), 0)).score

    return score


def test_worked_by_hand():
    # a: mean 3, variance 1; b: mean 7, variance 4. Together: mean 5, variance inside the groups 2.5.
    groups = {"a": [2.0, 4.0], "b": [5.0, 9.0]}
    score = trained(groups, min_count=2, shrinkage=0)
    assert score("a", 4.0) == pytest.approx((4 - 3) * 2.5**0.5 + 5)
    assert score("b", 9.0) == pytest.approx((9 - 7) * (2.5 / 4) ** 0.5 + 5)
    assert trained(groups, min_count=2, shrinkage=0, max_stretch=1)("b", 9.0) == pytest.approx(7)
    # Half the weight is the group's own: mean 4 and variance 1.75.
    assert trained(groups, min_count=2, shrinkage=2)("a", 4.0) == pytest.approx((2.5 / 1.75) ** 0.5 * 0 + 5)
    assert trained(groups, min_count=2, shrinkage=2)("a", 5.0) == pytest.approx((2.5 / 1.75) ** 0.5 + 5)
    assert trained(groups, min_count=3)("a", 4.0) == 4.0
    assert score("c", 1.0) == 1.0
    assert score("a", None) is None


def test_clamped_to_the_scale():
    score = trained({"a": [1.0, 3.0], "b": [8.0, 10.0]}, min_count=2, shrinkage=0)
    assert (score("a", 9.0), score("b", 0.0)) == (10, 0)


def test_a_group_without_spread_is_only_moved():
    assert trained({"a": [7.0] * 4, "b": [3.0, 5.0] * 2}, min_count=2, shrinkage=0)("a", 8.0) == pytest.approx(6.5)


@pytest.mark.parametrize("shrinkage", [0, 8])
def test_a_group_that_is_too_small_to_be_corrected_corrects_no_other(shrinkage):
    scores = [8.0, 9.0] * 8
    alone = trained({"a": scores}, min_count=16, shrinkage=shrinkage)
    with_stray = trained({"a": scores, "b": [1.0]}, min_count=16, shrinkage=shrinkage)
    assert alone("a", 8.5) == with_stray("a", 8.5) == pytest.approx(8.5)


def test_rounding_is_no_spread():
    """The variance of three times 1.2 is not quite 0 in floating point."""
    assert Moments().then([1.2] * 3, 0.98).variance > 0
    assert trained({"a": [1.2] * 3, "b": [3.0, 5.0]}, min_count=2, shrinkage=0)("a", 2.2) == pytest.approx(3.6)


def test_old_scores_fade():
    moments = Moments().then([2.0, 4.0], 0.5).then([9.0], 0.5)
    assert (moments.count, moments.total, moments.squares) == (2, 12, 91)
    assert (moments.mean, moments.variance) == (6, 9.5)
    assert pooled([moments, Moments(count=2, total=4, squares=8)]) == (4, 4.75)


def test_a_group_counts_once_in_the_mean_however_many_scores_it_has():
    few, many = Moments(count=2, total=4, squares=8), Moments(count=6, total=48, squares=402)
    assert pooled([few, many]) == (5, 6 * 3 / 8)  # means 2 and 8; variances 0 and 67 − 64
    assert pooled([few, many], 2.0)[0] == pytest.approx((2 / 4 * 2 + 6 / 8 * 8) / (2 / 4 + 6 / 8))


@pytest.mark.parametrize(
    "settings", [{"group_by": ["colour"]}, {"group_by": ["kind"], "within": ["role"]}, {"decay": 0}, {"min_count": 0}]
)
def test_refused_settings(settings):
    with pytest.raises(ConfigError, match="allowed"):
        CalibratedCoach(ScriptedCoach(biased), **settings)
