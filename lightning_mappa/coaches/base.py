"""What a coach is to the rollout coordinator."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightning_mappa.algorithm.rewards import SCORE_RANGE
from lightning_mappa.closing import close_all
from lightning_mappa.coaches.budget import Budget
from lightning_mappa.types import Action, ActionStatus, Episode, EpisodeStatus, ToolStatus, Verdict


class Coach(Protocol):
    """Scores single actions 0–10. It never decides whether the answer is right: a verifier in code does."""

    name: str

    async def score(self, episode: Episode, index: int) -> Verdict:
        """The verdict on `episode.actions[index]`.

        Called once the episode has ended, for many actions at a time; or as soon as the action is done, with an
        episode in progress, see `needs_outcome`. A call that fails returns a Verdict without a score and with the
        reason; it does not raise, except `CoachError` to stop the run.
        """
        ...


@runtime_checkable
class MadeOfCoaches(Protocol):
    """A coach that asks others. What the functions below do to a coach they do to its parts as well."""

    parts: tuple[Coach, ...]
    """A coach may be in it more than once: it is then asked as often."""


def parts_of(coach: object) -> tuple[Coach, ...]:
    """The distinct coaches that `coach` asks itself, in their order."""
    return tuple({id(part): part for part in coach.parts}.values()) if isinstance(coach, MadeOfCoaches) else ()


def with_parts(coach: object) -> Iterator[object]:
    """The coach, its parts, and theirs."""
    yield coach
    for part in parts_of(coach):
        yield from with_parts(part)


async def check_coach(coach: Coach) -> None:
    """Raises `ConfigError` where the coach, or a part of it, cannot be asked: no key, no such model. Costs nothing."""
    for part in with_parts(coach):
        check = getattr(part, "check", None)
        if check is not None:
            await check()


def close_coach(coach: Coach) -> None:
    """Ends the threads and connections of the coach and its parts."""
    close_all(with_parts(coach))


@runtime_checkable
class StatefulCoach(Coach, Protocol):
    """A coach whose verdicts depend on earlier ones: a checkpoint holds what it remembers."""

    def state_dict(self) -> Mapping[str, Any]:
        """JSON-able."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Forgets whatever has come since, verdicts of a batch that has not ended too."""
        ...


def coach_state(coach: Coach) -> Mapping[str, Any]:
    """What a checkpoint keeps of the coach and its parts; nothing of one that remembers nothing."""
    own = coach.state_dict() if isinstance(coach, StatefulCoach) else {}
    parts = [coach_state(part) for part in parts_of(coach)]
    return {"own": own, "parts": parts} if parts else own


def coach_snapshot(coach: Coach) -> Mapping[str, Any]:
    """A copy of its state, to be loaded again: a coach may hand out what it goes on to change."""
    state: Mapping[str, Any] = json.loads(json.dumps(coach_state(coach)))
    return state


def load_coach_state(coach: Coach, state: Mapping[str, Any]) -> None:
    parts = parts_of(coach)
    if isinstance(coach, StatefulCoach):
        coach.load_state_dict(state["own"] if parts else state)
    if parts:
        for part, kept in zip(parts, state["parts"], strict=True):
            load_coach_state(part, kept)


@runtime_checkable
class LearnsFromBatches(Protocol):
    """A coach that takes in its verdicts when all of a batch are there, so that their order is of no matter."""

    def end_of_batch(self) -> None:
        """Called after the last verdict of a batch and before the state is saved."""
        ...


def learns_from_batches(coach: Coach) -> bool:
    """Whether the coach, or a coach in it, does; one that only can says so by a false `learns`."""
    return any(isinstance(part, LearnsFromBatches) and getattr(part, "learns", True) for part in with_parts(coach))


def remembers(coach: Coach) -> bool:
    """Whether the verdicts of the coach, or of one in it, depend on earlier ones; a false `learns` says no."""
    return any(isinstance(part, StatefulCoach) and getattr(part, "learns", True) for part in with_parts(coach))


def can_be_put_back(coach: Coach) -> bool:
    """Whether all that learns in the coach has a state to load."""
    return all(isinstance(part, StatefulCoach) for part in with_parts(coach) if isinstance(part, LearnsFromBatches))


def end_batch(coach: Coach) -> None:
    for part in with_parts(coach):
        if isinstance(part, LearnsFromBatches):
            part.end_of_batch()


@runtime_checkable
class KeepsAccounts(Protocol):
    """A coach, or a part of one, whose calls cost money."""

    def bind(self, folder: Path) -> None:
        """Names the run folder, once, before the first verdict: accounts are kept there, and read on resume."""
        ...

    def summary(self) -> Mapping[str, Any]:
        """JSON-able totals of the run so far, resumed parts included; `calls` and `usd` where known."""
        ...


def bind_accounts(part: object, folder: Path) -> None:
    """Of several parts each has a folder of its own in `folder`."""
    if isinstance(part, KeepsAccounts):
        part.bind(folder)
    inner = parts_of(part)
    for number, coach in enumerate(inner):
        bind_accounts(coach, folder if len(inner) == 1 else folder / f"coach_{number}")


def accounts(part: object) -> Mapping[str, Any]:
    """Nothing of a coach that costs nothing; of several parts their figures, and the sums of calls and dollars."""
    own = part.summary() if isinstance(part, KeepsAccounts) else {}
    inner = [figures for coach in parts_of(part) if (figures := accounts(coach))]
    if len(inner) < 2:
        return {**own, **(inner[0] if inner else {})}
    costs = [figures.get("usd") for figures in inner]
    sums = {
        "calls": sum(figures.get("calls", 0) for figures in inner),
        "usd": None if None in costs else sum(cost for cost in costs if cost is not None),
    }
    return {**own, **sums, "coaches": inner}


@runtime_checkable
class SharesBudget(Protocol):
    """A coach whose calls can count in a budget that others share."""

    def share(self, budget: Budget) -> None:
        """Call it before `bind`. Raises `ConfigError` where its calls cannot be counted."""
        ...


def share_budget(coach: Coach, *, usd: float | None, calls: int | None) -> None:
    """One budget for all the coaches in `coach`, beside those that they have of their own; None and None is none."""
    if usd is None and calls is None:
        return
    budget = Budget(usd=usd, calls=calls, key="coach")
    for part in {id(part): part for part in with_parts(coach)}.values():
        if isinstance(part, SharesBudget):
            part.share(budget)


@runtime_checkable
class NeedsSomeOutcomes(Protocol):
    """A coach that judges some actions by the end of their episode, and the others without."""

    def needs_outcome_of(self, action: Action, last_agent_id: str | None) -> bool:
        """`last_agent_id`: whose actions end every complete episode; None where the workflow does not know."""
        ...


def needs_outcome(coach: Coach, action: Action, last_agent_id: str | None) -> bool:
    """Whether the verdict on `action` waits for the end of the episode.

    A coach says so for each action (`NeedsSomeOutcomes`), or for all by an attribute `needs_outcome`. One made of
    others needs what any of them needs, unless it says so itself; a coach that says nothing waits. Where it is not
    needed, the coach is asked as soon as the action and its tools are done, with `until` of the episode: such
    verdicts cost no time at the end.
    """
    if isinstance(coach, NeedsSomeOutcomes):
        return coach.needs_outcome_of(action, last_agent_id)
    own = getattr(coach, "needs_outcome", None)
    parts = parts_of(coach)
    if own is None and parts:
        return any(needs_outcome(part, action, last_agent_id) for part in parts)
    return own is None or bool(own)


def until(episode: Episode, index: int) -> Episode:
    """The episode as it stood when its action `index` was done: in progress, without answer and outcome."""
    return Episode(
        id=episode.id,
        task=episode.task,
        actions=episode.actions[: index + 1],
        status=EpisodeStatus.RUNNING,
        sample=episode.sample,
        last_agent_id=episode.last_agent_id,
    )


def shown_to(coach: Coach, episode: Episode, index: int, last_agent_id: str | None) -> Episode:
    """What a rollout gives the coach for action `index` of an episode that has ended."""
    episode = replace(episode, last_agent_id=last_agent_id)
    with_outcome = needs_outcome(coach, episode.actions[index], last_agent_id)
    return episode if with_outcome else until(episode, index)


def not_judged(action: Action) -> str | None:
    """Why no coach can judge the action, which is masked for a reason of its own; None where one can."""
    if action.status is ActionStatus.PROMPT_TOO_LONG:
        return "the prompt did not fit the context: nothing was generated"
    if any(result.status is ToolStatus.SANDBOX_ERROR for result in action.tool_results):
        return "the sandbox failed, which says nothing of the program"
    return None


@runtime_checkable
class CanBeHalted(Protocol):
    """A coach whose calls go on when who has asked for them does not wait any more."""

    async def halt(self, reason: str) -> None:
        """Nothing more is asked: later verdicts raise `CoachError` with `reason`. Returns when what is under way is
        booked."""
        ...


async def halt_coach(coach: Coach, reason: str) -> None:
    """Ends what the coach and its parts ask for, so that their accounts are complete."""
    await asyncio.gather(*(part.halt(reason) for part in with_parts(coach) if isinstance(part, CanBeHalted)))


async def ask(coach: Coach, episode: Episode, index: int) -> Verdict:
    """The coach's verdict; missing where its score is off the scale."""
    verdict = await coach.score(episode, index)
    if verdict.score is not None and not 0 <= verdict.score <= SCORE_RANGE:
        reason = f"the coach gave {verdict.score:g}, which is not in 0 … {SCORE_RANGE:g}"
        return Verdict(score=None, reason=reason, coach=coach.name)
    return verdict


async def verdicts_of(asked: Sequence[Coroutine[Any, Any, Verdict]]) -> list[Verdict]:
    """Awaits them side by side, in their order; when one raises, the others are cancelled."""
    tasks = [asyncio.create_task(verdict) for verdict in asked]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def unjudgeable(verdicts: Iterable[Verdict]) -> bool:
    """Whether those of the verdicts that are missing are so by no fault of their coaches, and some are."""
    absent = [verdict for verdict in verdicts if verdict.score is None]
    return bool(absent) and all(verdict.unjudgeable for verdict in absent)


def rescored(verdict: Verdict, score: float, reason: str) -> Verdict:
    """The verdict with another score; `raw_score` stays that of the coach which gave it first."""
    raw = verdict.score if verdict.raw_score is None else verdict.raw_score
    return replace(verdict, score=score, reason=reason, raw_score=None if raw == score else raw)
