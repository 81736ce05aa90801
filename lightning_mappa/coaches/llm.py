"""A coach that asks a language model."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_mappa.coaches.base import accounts, bind_accounts
from lightning_mappa.coaches.caller import Caller, RetryPolicy
from lightning_mappa.coaches.loop_thread import LoopThread
from lightning_mappa.coaches.pace import Pace
from lightning_mappa.coaches.parse import Reading, ScoreSteps, read_reply
from lightning_mappa.coaches.prompt import CaseWriter, ShowReference, read_rubric
from lightning_mappa.coaches.provider import CallGuard, PassingError, Provider, RefusedRequestError
from lightning_mappa.errors import CoachError, ConfigError
from lightning_mappa.types import Action, ActionStatus, Episode, ToolStatus, Verdict

CONSTANT_AFTER = 200
"""The same score so often in a row says nothing of the actions."""

_log = logging.getLogger(__name__)


class LLMCoach:
    """A `Coach`. No score is ever made up: a call without a readable reply is a missing verdict with its reason.

    Calls run on a thread of their own, so that they go on while the engine decodes. An action of which nothing
    was generated, or whose sandbox failed, is missing without a call.

    Args:
        provider: the service.
        rubric: a packaged rubric by name, or a text file by path.
        seed: of the fences around what agents wrote; the run's own.
        roles: agent id to what that agent is there for, where the name of its role does not say it.
        show_reference: `none`, `last` (only the last agent is judged with reference and outcome in view), `all`.
            What is judged without is judged as soon as it is done, the rest when the episode has ended.
        steps: `integer`, `half` or `decimal` scores; others are missing, never rounded.
        max_chars: the longest text shown in full, see `CaseWriter`; a request that is too long for the model is
            sent once more with half of it.
        max_tokens: of a reply, thinking among them; a reply that is cut is asked for once more with twice as many.
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
        show_reference: ShowReference = "last",
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
        self._provider = provider
        self._guard = guard
        self._writer = CaseWriter(
            read_rubric(rubric),
            seed=seed,
            roles=roles,
            show_reference=show_reference,
            steps=steps,
            max_chars=max_chars,
        )
        self._steps = steps
        self._max_tokens = max_tokens
        self._reask = reask
        policy = RetryPolicy(
            deadline_s=deadline_s, timeout_s=timeout_s, max_attempts=max_attempts, max_wait_s=max_wait_s
        )
        self._caller = Caller(provider, policy, Pace(max_concurrency, requests_per_minute, tokens_per_minute), guard)
        self._watch = _Watch(max_missing_rate, missing_window)
        self._loop = LoopThread(f"coach {self.name}")

    @property
    def counts(self) -> Counter[str]:
        """Verdicts given and missing, attempts and retries, and the alarms of replies (`Reading.alarms`)."""
        return self._watch.counts + self._caller.counts

    def bind(self, folder: Path) -> None:
        """Call it once, before the first verdict."""
        bind_accounts(self._guard, folder)

    def summary(self) -> dict[str, Any]:
        return {**accounts(self._guard), "counts": dict(sorted(self.counts.items()))}

    async def check(self) -> None:
        """Raises `ConfigError` when the provider cannot be used. Costs nothing."""
        await self._provider.check()

    async def score(self, episode: Episode, index: int) -> Verdict:
        reason = _not_judged(episode.actions[index])
        if reason is not None:
            return Verdict(score=None, reason=reason, coach=self.name)
        reading, model = await self._loop.run(self._reading(episode, index))
        self._watch.see(reading, model)
        return Verdict(score=reading.score, reason=reading.reason, coach=model)

    def needs_outcome_of(self, action: Action, last_agent_id: str | None) -> bool:
        """Only what is judged with the outcome in view waits for it."""
        if self._show_reference == "last":
            return last_agent_id in (None, action.agent_id)
        return self._show_reference == "all"

    def close(self) -> None:
        """Ends the thread and the connections."""
        self._loop.close(self._provider.close())

    async def _reading(self, episode: Episode, index: int) -> tuple[Reading, str]:
        try:
            first, model = await self._asked(episode, index, self._max_tokens, reminder=False)
            if not (first.ask_again and self._reask):
                return first, model
            tokens = 2 * self._max_tokens if first.cut else self._max_tokens
            again, model = await self._asked(episode, index, tokens, reminder=True)
        except PassingError as error:
            return Reading(score=None, reason=f"no reply: {error}"), self.name
        except RefusedRequestError as error:
            return Reading(score=None, reason=f"the request was refused: {error}"), self.name
        reason = again.reason if again.score is not None else f"{again.reason}; asked twice"
        return replace(again, reason=reason, alarms=("asked_again", *first.alarms, *again.alarms)), model

    async def _asked(self, episode: Episode, index: int, max_tokens: int, *, reminder: bool) -> tuple[Reading, str]:
        case = self._writer.case(episode, index, max_tokens=max_tokens, reminder=reminder)
        shrunk: tuple[str, ...] = ()
        try:
            reply = await self._caller.call(case.request)
        except RefusedRequestError as error:
            if not error.too_long:
                raise
            shrunk = ("shrunk",)
            case = self._writer.case(episode, index, max_tokens=max_tokens, reminder=reminder, shrink=1)
            reply = await self._caller.call(case.request)
        reading = read_reply(reply, case=case.token, steps=self._steps)
        return replace(reading, alarms=(*shrunk, *reading.alarms)), reply.model


class _Watch:
    """What only shows over many verdicts."""

    def __init__(self, max_missing_rate: float, window: int) -> None:
        if not 0 <= max_missing_rate <= 1:
            raise ConfigError(f"coach.max_missing_rate is {max_missing_rate}; allowed: 0 to 1")
        self.counts: Counter[str] = Counter()
        self._max_missing_rate = max_missing_rate
        self._missing: deque[bool] = deque(maxlen=window)
        self._run: tuple[float | None, int] = (None, 0)
        self._model: str | None = None

    def see(self, reading: Reading, model: str) -> None:
        """Raises `CoachError` when too many of the last verdicts are missing."""
        self.counts.update(("verdicts", *reading.alarms))
        self._missing.append(reading.score is None)
        if reading.score is None:
            self.counts["missing"] += 1
            self._refuse_too_many_missing(reading.reason)
            return
        self._see_model(model)
        last, times = self._run
        self._run = (reading.score, times + 1 if reading.score == last else 1)
        if self._run[1] == CONSTANT_AFTER:
            self.counts["constant"] += 1
            _log.warning("the coach %s gave %g to %d actions in a row", model, reading.score, CONSTANT_AFTER)

    def _see_model(self, model: str) -> None:
        if self._model not in (None, model):
            self.counts["model_changed"] += 1
            _log.warning("the coach's replies come from %s, earlier ones from %s", model, self._model)
        self._model = model

    def _refuse_too_many_missing(self, reason: str) -> None:
        missing, window = sum(self._missing), self._missing.maxlen or 1
        # Before the window is full, too: enough are missing for it to be too many however the rest turns out.
        if missing > self._max_missing_rate * window:
            raise CoachError(
                f"{missing} of the last {len(self._missing)} verdicts are missing; with more than "
                f"coach.max_missing_rate={self._max_missing_rate:g} of {window} the run stops. The last: {reason}. "
                "It can go on with resume"
            )


def _not_judged(action: Action) -> str | None:
    if action.status is ActionStatus.PROMPT_TOO_LONG:
        return "the prompt did not fit the context: nothing was generated"
    if any(result.status is ToolStatus.SANDBOX_ERROR for result in action.tool_results):
        return "the sandbox failed, which says nothing of the program"
    return None


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"coach.{name} is {value!r}; allowed: {', '.join(allowed)}")
