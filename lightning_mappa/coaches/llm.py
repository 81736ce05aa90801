"""A coach that asks a language model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_mappa.coaches.base import SharesBudget, accounts, bind_accounts
from lightning_mappa.coaches.budget import Budget
from lightning_mappa.coaches.caller import Caller, RetryPolicy
from lightning_mappa.coaches.faults import FaultMemory
from lightning_mappa.coaches.loop_thread import LoopThread
from lightning_mappa.coaches.pace import Pace
from lightning_mappa.coaches.parse import Reading, ScoreSteps, read_reply
from lightning_mappa.coaches.parse_batch import read_batch
from lightning_mappa.coaches.prompt import Case, CaseWriter, ShowReference, read_rubric
from lightning_mappa.coaches.provider import CallGuard, PassingError, Provider, RefusedRequestError
from lightning_mappa.coaches.shared_calls import SharedCalls
from lightning_mappa.coaches.watch import Watch
from lightning_mappa.errors import ConfigError
from lightning_mappa.types import Action, ActionStatus, Episode, ToolStatus, Verdict

TOKENS_PER_STEP = 200
"""More tokens of a reply for every further step that it judges."""

Readings = tuple[Mapping[int, Reading], str]
"""By the index of the action; and the model that replied."""


class LLMCoach:
    """A `Coach`. No score is ever made up: a call without a readable reply is a missing verdict with its reason.

    Calls run on a thread of their own, so that they go on while the engine decodes. An action of which nothing
    was generated, or whose sandbox failed, is missing without a call.

    Args:
        provider: the service.
        rubric: a packaged rubric by name, or a text file by path.
        seed: of the fences around what agents wrote; the run's own.
        roles: agent id to what that agent is there for, where the name of its role does not say it.
        stages: agent id to the files that it needs and makes; the coach is then told which of them are not there.
        show_reference: `none`, `last` (only the last agent is judged with reference and outcome in view), `all`.
            What is judged without is judged as soon as it is done, the rest when the episode has ended.
        batched: all actions of an episode in one call, once it has ended. Each is judged with the later ones in view,
            and with the outcome where `show_reference` shows it to any of them.
        recall_faults: so many of a role's faults that recurred in earlier batches are told with its actions, see
            `FaultMemory`.
        steps: `integer`, `half` or `decimal` scores; others are missing, never rounded.
        max_chars: the longest text shown in full, see `CaseWriter`; a request that is too long for the model is
            sent once more with half of it.
        max_tokens: of a reply, thinking among them, and 200 more for every further step of a batched one; a reply that
            is cut is asked for once more with twice as many.
        reask: ask once more, with the same case, when a reply cannot be read.
        deadline_s: of a call with all its attempts, see `RetryPolicy` for this and the next three.
        max_concurrency: calls under way; fewer while the server says that it is too much.
        requests_per_minute, tokens_per_minute: None knows no limit.
        max_missing_rate: more missing verdicts than this among the last `missing_window` stop the run.
        guard: stands around every attempt: budget, log, cache.
    """

    def __init__(
        self,
        provider: Provider,
        *,
        rubric: str = "general",
        seed: int = 0,
        roles: Mapping[str, str] | None = None,
        stages: Mapping[str, Mapping[str, Sequence[str]]] | None = None,
        show_reference: ShowReference = "last",
        batched: bool = False,
        recall_faults: int = 0,
        steps: ScoreSteps = "integer",
        max_chars: int = 24_000,
        max_tokens: int = 2048,
        reask: bool = True,
        deadline_s: float = 300.0,
        timeout_s: float = 120.0,
        max_attempts: int = 8,
        max_wait_s: float = 60.0,
        max_concurrency: int = 32,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        max_missing_rate: float = 0.2,
        missing_window: int = 32,
        guard: CallGuard | None = None,
    ) -> None:
        _check_choice("show_reference", show_reference, ("none", "last", "all"))
        _check_choice("steps", steps, ("integer", "half", "decimal"))
        for name, value in (
            ("max_chars", max_chars),
            ("max_tokens", max_tokens),
            ("max_concurrency", max_concurrency),
            ("missing_window", missing_window),
            ("requests_per_minute", requests_per_minute),
            ("tokens_per_minute", tokens_per_minute),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"coach.{name} is {value}; allowed: 1 or more")
        self.name = provider.model
        self._show_reference = show_reference
        self._batched = batched
        self._recall_faults = recall_faults
        self._faults = FaultMemory(recall_faults)
        self._calls: SharedCalls[Readings] = SharedCalls()
        self._provider = provider
        self._guard = guard
        self._writer = CaseWriter(
            read_rubric(rubric),
            seed=seed,
            roles=roles,
            stages=stages,
            show_reference=show_reference,
            steps=steps,
            batched=batched,
            max_chars=max_chars,
        )
        self._steps = steps
        self._max_tokens = max_tokens
        self._reask = reask
        policy = RetryPolicy(
            deadline_s=deadline_s, timeout_s=timeout_s, max_attempts=max_attempts, max_wait_s=max_wait_s
        )
        self._caller = Caller(provider, policy, Pace(max_concurrency, requests_per_minute, tokens_per_minute), guard)
        self._watch = Watch(max_missing_rate, missing_window)
        self._loop = LoopThread(f"coach {self.name}")

    @property
    def counts(self) -> Counter[str]:
        """Verdicts given and missing, attempts and retries, and the alarms of replies (`Reading.alarms`)."""
        return self._watch.counts + self._caller.counts

    def bind(self, folder: Path) -> None:
        """Call it once, before the first verdict."""
        bind_accounts(self._guard, folder)

    def share(self, budget: Budget) -> None:
        if not isinstance(self._guard, SharesBudget):
            raise ConfigError(f"coach {self.name} has no guard that counts its calls in a shared budget")
        self._guard.share(budget)

    def summary(self) -> dict[str, Any]:
        return {**accounts(self._guard), "counts": dict(sorted(self.counts.items()))}

    async def check(self) -> None:
        """Raises `ConfigError` when the provider cannot be used. Costs nothing."""
        await self._provider.check()

    async def score(self, episode: Episode, index: int) -> Verdict:
        self._faults.see(episode, index)
        reason = _not_judged(episode.actions[index])
        if reason is not None:
            return Verdict(score=None, reason=reason, coach=self.name)
        readings, model = await self._loop.run(self._readings_with(episode, index))
        reading = readings[index]
        self._watch.see(reading, model)
        return Verdict(score=reading.score, reason=reading.reason, coach=model)

    def needs_outcome_of(self, action: Action, last_agent_id: str | None) -> bool:
        """Only what is judged with the outcome in view waits for it, and whole episodes."""
        if self._show_reference == "last" and not self._batched:
            return last_agent_id in (None, action.agent_id)
        return self._batched or self._show_reference == "all"

    @property
    def learns(self) -> bool:
        """Whether faults of earlier batches are told to the coach."""
        return self._recall_faults > 0

    def end_of_batch(self) -> None:
        self._faults.end_of_batch()

    def state_dict(self) -> dict[str, Any]:
        return self._faults.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._faults.load_state_dict(state)

    def close(self) -> None:
        """Ends the thread and the connections."""
        self._loop.close(self._provider.close(), timeout_s=60.0)  # engines of its own take a while to end

    async def _readings_with(self, episode: Episode, index: int) -> Readings:
        """Those of one call with the action among them; a batched one is shared with the episode's other actions."""
        if not self._batched:
            return await self._readings(episode, (index,))
        indices = tuple(action.index for action in episode.actions if _not_judged(action) is None)
        name = self._case(episode, indices, self._tokens(indices)).request.call_id
        return await self._calls.get(name, index, indices, lambda: self._readings(episode, indices))

    async def _readings(self, episode: Episode, indices: Sequence[int]) -> Readings:
        first: Mapping[int, Reading] = {}
        model = self.name
        try:
            first, model = await self._asked(episode, indices, self._tokens(indices), reminder=False)
            if not (self._reask and any(reading.ask_again for reading in first.values())):
                return first, model
            cut = any(reading.cut for reading in first.values())
            again, model = await self._asked(episode, indices, (1 + cut) * self._tokens(indices), reminder=True)
        except PassingError as error:
            return _completed(first, indices, f"no reply: {error}"), model
        except RefusedRequestError as error:
            return _completed(first, indices, f"the request was refused: {error}"), model
        return {index: _asked_twice(first[index], again[index]) for index in indices}, model

    async def _asked(self, episode: Episode, indices: Sequence[int], max_tokens: int, *, reminder: bool) -> Readings:
        case = self._case(episode, indices, max_tokens, reminder=reminder)
        shrunk: tuple[str, ...] = ()
        try:
            reply = await self._caller.call(case.request)
        except RefusedRequestError as error:
            if not error.too_long:
                raise
            shrunk = ("shrunk",)
            case = self._case(episode, indices, max_tokens, reminder=reminder, shrink=1)
            reply = await self._caller.call(case.request)
        if not self._batched:
            reading = read_reply(reply, case=case.token, steps=self._steps)
            return {indices[0]: replace(reading, alarms=(*shrunk, *reading.alarms))}, reply.model
        numbers = {index + 1: index for index in indices}
        readings = read_batch(reply, case=case.token, numbers=tuple(numbers), steps=self._steps)
        return {
            numbers[number]: replace(reading, alarms=(*shrunk, *reading.alarms)) for number, reading in readings.items()
        }, reply.model

    def _case(
        self, episode: Episode, indices: Sequence[int], max_tokens: int, *, reminder: bool = False, shrink: int = 0
    ) -> Case:
        roles = dict.fromkeys(episode.actions[index].role for index in indices)
        recalled = "\n".join(told for role in roles if (told := self._faults.told(role)))
        options: dict[str, Any] = {
            "max_tokens": max_tokens,
            "reminder": reminder,
            "shrink": shrink,
            "recalled": recalled,
        }
        if self._batched:
            return self._writer.batch(episode, indices, **options)
        return self._writer.case(episode, indices[0], **options)

    def _tokens(self, indices: Sequence[int]) -> int:
        return self._max_tokens + TOKENS_PER_STEP * (len(indices) - 1)


def _completed(first: Mapping[int, Reading], indices: Sequence[int], reason: str) -> dict[int, Reading]:
    """What was read before a call that failed, and `reason` for the rest."""
    lost = Reading(score=None, reason=reason)
    return {index: first[index] if index in first and not first[index].ask_again else lost for index in indices}


def _asked_twice(first: Reading, again: Reading) -> Reading:
    """The second reading, where the first was at fault."""
    if not first.ask_again:
        return first
    reason = again.reason if again.score is not None else f"{again.reason}; asked twice"
    return replace(again, reason=reason, alarms=("asked_again", *first.alarms, *again.alarms))


def _not_judged(action: Action) -> str | None:
    if action.status is ActionStatus.PROMPT_TOO_LONG:
        return "the prompt did not fit the context: nothing was generated"
    if any(result.status is ToolStatus.SANDBOX_ERROR for result in action.tool_results):
        return "the sandbox failed, which says nothing of the program"
    return None


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"coach.{name} is {value!r}; allowed: {', '.join(allowed)}")
