"""A coach that asks a language model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_mappa.coaches.base import SharesBudget, accounts, bind_accounts, not_judged
from lightning_mappa.coaches.budget import Budget
from lightning_mappa.coaches.caller import Caller, RetryPolicy
from lightning_mappa.coaches.faults import FaultMemory
from lightning_mappa.coaches.fence import fence_key
from lightning_mappa.coaches.loop_thread import LoopThread
from lightning_mappa.coaches.pace import Pace
from lightning_mappa.coaches.parse import ScoreSteps, read_reply
from lightning_mappa.coaches.parse_batch import read_batch
from lightning_mappa.coaches.prompt import Case, CaseWriter, ShowReference, read_rubric
from lightning_mappa.coaches.provider import CallGuard, PassingError, Provider, RefusedRequestError
from lightning_mappa.coaches.readings import Readings
from lightning_mappa.coaches.shared_calls import SharedCalls
from lightning_mappa.coaches.watch import Watch
from lightning_mappa.errors import ConfigError
from lightning_mappa.seeds import derive_seed
from lightning_mappa.types import Action, Episode, Verdict

TOKENS_PER_STEP = 200
"""More tokens of a reply for every further step that it judges."""
_CLOSE_S = 60.0
"""For engines of the provider's own, which take a while to end."""
MOST_REPLAYS = 1000
"""Of replies to one case that gave no score; no log holds so many."""


class LLMCoach:
    """A `Coach`. No score is ever made up: a call without a readable reply is a missing verdict with its reason.

    Calls run on a thread of their own, so that they go on while the engine decodes. An action of which nothing
    was generated, or whose sandbox failed, is missing without a call. Of a run that is resumed, a reply that gave no
    score is passed over, and the case asked about anew.

    Args:
        provider: the service.
        rubric: a packaged rubric by name, or a text file by path.
        seed: the run's own, of replies where the provider draws them by seed. Such a seed follows from this one, the
            episode (its step among it), the action, and which time it is asked about.
        roles: agent id to what that agent is there for, where the name of its role does not say it.
        stages: agent id to the files that it needs and makes; the coach is then told which of them are not there.
        show_reference: `none`, `last` (only the workflow's last agent is judged with reference and outcome in view, see
            `ShowReference`), `all`.
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
        guard: CallGuard | None = None,
    ) -> None:
        _check_choice("show_reference", show_reference, ("none", "last", "all"))
        _check_choice("steps", steps, ("integer", "half", "decimal"))
        for name, value in (
            ("max_chars", max_chars),
            ("max_tokens", max_tokens),
            ("max_concurrency", max_concurrency),
            ("requests_per_minute", requests_per_minute),
            ("tokens_per_minute", tokens_per_minute),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"coach.{name} is {value}; allowed: 1 or more")
        self.name = provider.model
        self._show_reference = show_reference
        self._batched = batched
        self._seed = seed
        self._asked_about: Counter[str] = Counter()
        self._recall_faults = recall_faults
        self._faults = FaultMemory(recall_faults)
        self._calls: SharedCalls[Readings] = SharedCalls()
        self._provider = provider
        self._guard = guard
        self._writer = CaseWriter(
            read_rubric(rubric),
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
        self._drain_s = timeout_s + 30.0
        self._caller = Caller(provider, policy, Pace(max_concurrency, requests_per_minute, tokens_per_minute), guard)
        self._watch = Watch()
        self._loop = LoopThread(f"coach {self.name}")

    @property
    def counts(self) -> Counter[str]:
        """Verdicts given and missing, attempts and retries, and the alarms of replies (`Reading.alarms`)."""
        return self._watch.counts + self._caller.counts

    def bind(self, folder: Path) -> None:
        """Call it once, before the first verdict."""
        bind_accounts(self._guard, folder)
        shared = getattr(self._guard, "cache_folder", None)
        self._writer.key = fence_key(folder, *([] if shared is None else [shared]))

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
        reason = not_judged(episode.actions[index])
        if reason is not None:
            return Verdict(score=None, reason=reason, coach=self.name, unjudgeable=True)
        readings = await self._loop.run(self._readings_with(episode, index))
        reading = readings.by_index[index]
        self._watch.see(reading, readings.model)
        return Verdict(score=reading.score, reason=reading.reason, coach=readings.model)

    def needs_outcome_of(self, action: Action, last_agent_id: str | None) -> bool:
        """Only what is judged with the outcome in view waits for it, and whole episodes."""
        if self._show_reference == "last" and not self._batched:
            return action.agent_id == last_agent_id
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

    async def halt(self, reason: str) -> None:
        await self._loop.run(self._caller.halt(reason))

    def close(self) -> None:
        """Ends the thread and the connections, once the calls in flight have ended and are booked."""
        self._loop.close(self._provider.close(), _CLOSE_S, first=self._caller.drain(), first_s=self._drain_s)

    async def _readings_with(self, episode: Episode, index: int) -> Readings:
        """Those of one call with the action among them; a batched one is shared with the episode's other actions."""
        if not self._batched:
            return await self._readings(episode, (index,))
        indices = tuple(action.index for action in episode.actions if not_judged(action) is None)
        name = self._case(episode, indices, self._tokens(indices)).request.call_id
        return await self._calls.get(name, index, indices, lambda: self._readings(episode, indices))

    async def _readings(self, episode: Episode, indices: Sequence[int]) -> Readings:
        """A reply that is replayed and gave a step no score is no answer to be had for good: it is asked for anew."""
        name = "all" if self._batched else str(indices[0])
        sample = self._asked_about[f"{episode.id}/{name}"]
        self._asked_about[f"{episode.id}/{name}"] += 1

        async def asked(anew: int) -> Readings:
            seed = derive_seed(self._seed, "coach", episode.id, name, sample, anew)
            return await self._asked_twice(episode, indices, seed)

        readings = await asked(0)
        for anew in range(1, MOST_REPLAYS):
            if readings.complete or not readings.replayed:
                break
            readings = readings.filled(await asked(anew))
        return readings

    async def _asked_twice(self, episode: Episode, indices: Sequence[int], seed: int) -> Readings:
        """Where the first reply is at fault."""
        first, tokens = Readings(by_index={}, model=self.name), self._tokens(indices)
        try:
            first = await self._asked(episode, indices, tokens, seed, reminder=False)
            if not (self._reask and first.ask_again):
                return first
            return first.asked_twice(await self._asked(episode, indices, (1 + first.cut) * tokens, seed, reminder=True))
        except PassingError as error:
            return first.lost(indices, f"no reply: {error}")
        except RefusedRequestError as error:
            return first.lost(indices, f"the request was refused: {error}")

    async def _asked(
        self, episode: Episode, indices: Sequence[int], max_tokens: int, seed: int, *, reminder: bool
    ) -> Readings:
        case = self._case(episode, indices, max_tokens, reminder=reminder)
        shrunk: tuple[str, ...] = ()
        try:
            answer = await self._caller.call(replace(case.request, seed=seed))
        except RefusedRequestError as error:
            if not error.too_long:
                raise
            shrunk = ("shrunk",)
            case = self._case(episode, indices, max_tokens, reminder=reminder, shrink=1)
            answer = await self._caller.call(replace(case.request, seed=seed))
        reply = answer.reply
        if self._batched:
            numbers = {index + 1: index for index in indices}
            read = read_batch(reply, case=case.token, numbers=tuple(numbers), steps=self._steps)
            by_index = {numbers[number]: reading for number, reading in read.items()}
        else:
            by_index = {indices[0]: read_reply(reply, case=case.token, steps=self._steps)}
        by_index = {index: replace(reading, alarms=(*shrunk, *reading.alarms)) for index, reading in by_index.items()}
        return Readings(by_index=by_index, model=reply.model, replayed=answer.replayed)

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


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"coach.{name} is {value!r}; allowed: {', '.join(allowed)}")
