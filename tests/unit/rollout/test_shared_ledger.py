"""One agent in several roles: its samples are the actions of all of them, in episode order, in one account."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_mappa.algorithm.advantages import ActionStats, CreditSettings
from lightning_mappa.rollout.ledger import Ledger, RewardSettings
from lightning_mappa.types import ScoredEpisode
from tests.unit.factories import make_action, make_scored
from tests.unit.rollout.test_ledger import play_step

ROLES = ("solver", "critic", "solver", "judge")
"""Who acts when; the critic with the solver's weights, the judge with its own."""
WEIGHTS = {"solver": "solver", "critic": "solver", "judge": None}


def episodes() -> list[ScoredEpisode]:
    scores: dict[str, list[float | None]] = {"e1": [7, 8, 3, 9], "e2": [2, None, 4, 1]}
    return [
        make_scored(
            name,
            [
                make_action(
                    episode_id=name,
                    index=index,
                    agent_id=role,
                    weights=WEIGHTS[role],
                    turn=ROLES[:index].count(role),
                    response_ids=(10 * index + 3, 4),
                )
                for index, role in enumerate(ROLES)
            ],
            of_episode,
        )
        for name, of_episode in scores.items()
    ]


def ledger(*, trained: bool = True, **credit: Any) -> Ledger:
    return Ledger({"solver": trained, "judge": True}, CreditSettings(**credit), RewardSettings())


def test_an_agent_gets_the_actions_of_all_its_roles_in_episode_order():
    books = ledger()
    books.open_step(0, episodes())
    own = books.experiences(0, "solver")
    assert [e.key for e in own] == [(name, index) for name in ("e1", "e2") for index in (0, 1, 2)]
    assert [e.acted_as for e in own] == ["solver", "critic", "solver"] * 2
    assert {e.agent_id for e in own} == {"solver"}
    assert [(e.key, e.acted_as) for e in books.experiences(0, "judge")] == [(("e1", 3), ""), (("e2", 3), "")]


def test_every_action_is_counted_once():
    counts = play_step(ledger(), episodes())
    assert (counts.produced, counts.trained, dict(counts.masked)) == (8, 7, {"missing_verdict": 1})
    frozen = play_step(ledger(trained=False), episodes())
    assert (frozen.trained, frozen.frozen) == (2, 6)


def test_advantages_are_formed_over_all_roles_of_the_agent():
    """Rewards of the solver's five scored actions: .7 .8 .3 and .2 .4, mean .48, population std sqrt(.0536)."""
    books = ledger()
    play_step(books, episodes())
    given = books.credits_of(0, "solver")
    known = [credit for credit in given.values() if credit.masked is None]
    assert len(given) == 6
    assert {(round(credit.mean, 12), round(credit.std, 12)) for credit in known} == {(0.48, round(0.0536**0.5, 12))}
    (judge,) = {(round(credit.mean, 12), round(credit.std, 12)) for credit in books.credits_of(0, "judge").values()}
    assert judge == pytest.approx((0.5, 0.4))


def test_later_rewards_of_every_role_of_the_agent_are_in_its_returns():
    """e1: .7 + .8 + .3, .8 + .3, .3. In e2 the critic's missing verdict masks the solver's first action too."""
    books = ledger(return_scope="agent")
    play_step(books, episodes())
    given = books.credits_of(0, "solver")
    assert [given["e1", index].offset for index in (0, 1, 2)] == pytest.approx([1.8, 1.1, 0.3])
    assert [given["e2", index].masked for index in (0, 1, 2)] == ["return_unknown", "missing_verdict", None]


def test_the_kl_of_an_agent_is_charged_in_all_its_roles():
    """r = .7 − .1 · 2 for each of its actions, whoever of its roles took it; the judge has its own coefficient."""
    books = ledger(return_scope="trajectory")
    books.open_step(0, episodes()[:1])
    own = {e.key: ActionStats(n_tokens=2, kl_sum=2.0) for e in books.experiences(0, "solver")}
    books.post(0, "solver", own, kl_coef=0.1)
    books.post(0, "judge", {("e1", 3): ActionStats(n_tokens=2, kl_sum=1.0)}, kl_coef=0.5)
    returns = [books.credits_of(0, agent)["e1", i].offset for i, agent in enumerate(("solver",) * 3 + ("judge",))]
    assert returns == pytest.approx([0.5 + 0.6 + 0.1 + 0.4, 0.6 + 0.1 + 0.4, 0.1 + 0.4, 0.4])
