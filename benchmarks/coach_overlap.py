"""How much of a coach's time is left on the critical path? The tables in coach_overlap.md.

    python benchmarks/coach_overlap.py

The real `RolloutCoordinator` plays 32 episodes of 3 or 4 actions with a simulated engine and a simulated coach.
Verdicts take log-normal 2–5 s (90 % of them), scaled by 0.05; 32 calls may be in flight. Every row is three seeds.

Target: rollout and coaching together within 1.15 × (max(rollout alone, calls × latency / 32) + slowest call).
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import random
import statistics
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_mappa.coaches.prompt import ShowReference
from lightning_mappa.rollout.coordinator import RolloutCoordinator
from lightning_mappa.rollout.engine import Generation, GenerationRequest, SamplingParams, Session
from lightning_mappa.rollout.fingerprint import ServedFingerprint
from lightning_mappa.rollout.plan import RolloutPlan, SeatContext
from lightning_mappa.rollout.wave import WaveScheduler
from lightning_mappa.tasks.base import Split
from lightning_mappa.types import Action, ActionStatus, Episode, StopReason, Task, Verdict
from lightning_mappa.workflows.base import Message, Seat

EPISODES = 32
IN_FLIGHT = 32
SCALE = 0.05
MEDIAN_S, SIGMA = 10**0.5 * SCALE, 0.2785  # 5 % below 2 s, 5 % above 5 s
MEAN_S = 3.287 * SCALE
SEEDS = (0, 1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds of one seed, but for `calls`."""

    calls: int
    alone: float
    """Rollout without a coach."""
    mean_call: float
    slowest_call: float
    early: float
    """Rollout and verdicts, each verdict started when its action was done."""
    last: float
    """The same, but those of the last agent, which is shown the outcome, started when their episode had ended."""
    at_end: float
    """The same, all verdicts started when their episode had ended."""
    awaited: float
    """The same, each verdict awaited before the next action."""

    @property
    def bound(self) -> float:
        return max(self.alone, self.calls * self.mean_call / IN_FLIGHT) + self.slowest_call


class SimulatedCoach:
    """Takes the same time for the same action in every arrangement."""

    name = "simulated"

    def __init__(self, seed: int, *, show_reference: ShowReference = "all") -> None:
        self._show_reference = show_reference
        self.latencies: list[float] = []
        self._seed = seed
        self._slots = asyncio.Semaphore(IN_FLIGHT)

    def needs_outcome_of(self, action: Action, last_agent_id: str | None) -> bool:
        """As `LLMCoach` has it."""
        return self._show_reference == "all" or (self._show_reference == "last" and action.agent_id == last_agent_id)

    async def score(self, episode: Episode, index: int) -> Verdict:
        digest = hashlib.sha256(f"{self._seed}/{episode.id}/{index}".encode()).digest()
        latency = random.Random(digest).lognormvariate(0.0, SIGMA) * MEDIAN_S
        self.latencies.append(latency)
        async with self._slots:
            await asyncio.sleep(latency)
        return Verdict(score=5.0, reason="simulated", coach=self.name)


class StreamingEngine:
    """Every generation takes the same time and waits for no other, as in an engine with continuous batching."""

    def __init__(self, generation_s: float) -> None:
        self._generation_s = generation_s

    def session(self, episode_id: str) -> AbstractAsyncContextManager[Session]:
        return nullcontext(self)

    async def generate(self, request: GenerationRequest) -> Generation:
        await asyncio.sleep(self._generation_s)
        return _GENERATION

    def update_weights(self, agent_id: str, version: int, tensors: Mapping[str, Tensor]) -> None:
        raise NotImplementedError("nothing is trained here")

    def fingerprints(
        self, agent_id: str, prompt_ids: Sequence[int], token_ids: Sequence[int]
    ) -> list[ServedFingerprint]:
        raise NotImplementedError("nothing is trained here")

    def close(self) -> None:
        pass

    def policy_version(self, agent_id: str) -> int:
        return 0

    def context_length(self, agent_id: str) -> int:
        return 1024


class WaveEngine(StreamingEngine):
    """Decodes when every live episode waits for a generation, as the transformers engine does."""

    def __init__(self, generation_s: float) -> None:
        super().__init__(generation_s)
        self._waves = WaveScheduler(self._decode)

    def session(self, episode_id: str) -> AbstractAsyncContextManager[Session]:
        return self._waves.session(episode_id)

    def _decode(self, requests: Sequence[GenerationRequest]) -> Sequence[Generation]:
        time.sleep(self._generation_s)
        return [_GENERATION] * len(requests)


_GENERATION = Generation(response_ids=(1,), log_probs=(0.0,), stop_reason=StopReason.STOP, policy_version=0)


@dataclass(frozen=True, slots=True)
class OneActionSeat:
    agent_id: str
    context: SeatContext
    judge: SimulatedCoach | None = None
    """Awaited before the seat hands on."""
    role: str = "Agent"

    async def act(self, task: Task, seen: Sequence[Message], **extra: Any) -> Message:
        context = self.context
        sampling = SamplingParams(max_new_tokens=1)
        await context.session.generate(
            GenerationRequest(agent_id=self.agent_id, prompt_ids=(1,), sampling=sampling, seed=0)
        )
        action = Action(
            episode_id=context.episode_id,
            index=len(context.actions),
            agent_id=self.agent_id,
            role=self.role,
            turn=len(context.actions),
            prompt_ids=(1,),
            response_ids=(1,),
            rollout_log_probs=(0.0,),
            prompt_text="?",
            text="!",
            status=ActionStatus.OK,
            stop_reason=StopReason.STOP,
        )
        context.actions.append(action)
        if self.judge is not None:
            episode = Episode(id=context.episode_id, task=task, actions=tuple(context.actions))
            await self.judge.score(episode, action.index)
        return Message(agent_id=self.agent_id, role=self.role, text=action.text)


class Actions:
    """A workflow whose task says how many actions it takes, the last of them by an agent of its own."""

    agent_ids = ("agent", "last")
    last_agent_id = "last"

    async def run(self, task: Task, agents: Mapping[str, Seat]) -> str:
        for _ in range(task.metadata["actions"] - 1):
            await agents["agent"].act(task, ())
        return (await agents["last"].act(task, ())).text


class NoTasks:
    def tasks(self, split: Split) -> Sequence[Task]:
        return ()

    def answer(self, text: str) -> str | None:
        return text

    def grade(self, task: Task, answer: str | None) -> float | None:
        return 1.0


async def seconds(engine: StreamingEngine, coach: SimulatedCoach, seed: int, *, scored: bool, awaited: bool) -> float:
    """From the start of a rollout batch to its last verdict, by the clock of the event loop."""
    coordinator = RolloutCoordinator(
        workflow=Actions(),
        source=NoTasks(),
        engine=engine,
        coach=coach,
        seat_for=lambda agent_id, context: OneActionSeat(agent_id, context, coach if awaited else None),
        workspaces=lambda episode_id: nullcontext(Path()),
        max_episodes_in_flight=EPISODES,
        deadline_s=60.0,
    )
    lengths = random.Random(seed)
    tasks = [
        Task(id=f"{i}", kind="simulated", prompt="?", metadata={"actions": lengths.choice((3, 4))})
        for i in range(EPISODES)
    ]
    plan = RolloutPlan(split="train", step=0, tasks=tasks, n_samples=1, temperature=1.0, scored=scored)
    clock = asyncio.get_running_loop().time
    start = clock()
    await coordinator.collect(plan)
    return clock() - start


Run = Callable[[Coroutine[Any, Any, float]], float]


def measure(new_engine: Callable[[float], StreamingEngine], generation_s: float, seed: int, run: Run) -> Measured:
    """One seed of one row. `run` runs a coroutine to its end."""
    early = SimulatedCoach(seed, show_reference="none")

    def took(coach: SimulatedCoach, *, scored: bool, awaited: bool = False) -> float:
        return run(seconds(new_engine(generation_s), coach, seed, scored=scored, awaited=awaited))

    return Measured(
        alone=took(SimulatedCoach(seed), scored=False),
        early=took(early, scored=True),
        last=took(SimulatedCoach(seed, show_reference="last"), scored=True),
        at_end=took(SimulatedCoach(seed, show_reference="all"), scored=True),
        awaited=took(SimulatedCoach(seed), scored=False, awaited=True),
        calls=len(early.latencies),
        mean_call=statistics.fmean(early.latencies),
        slowest_call=max(early.latencies),
    )


def row(engine: str, ratio: float, measured: Sequence[Measured]) -> str:
    """Means over the seeds; of ratios, the worst."""

    def mean(of: Callable[[Measured], float]) -> float:
        return statistics.fmean(of(m) for m in measured)

    def parts(of: Callable[[Measured], float]) -> str:
        """One arrangement: seconds, over the bound, and how many times as fast as awaiting each verdict."""
        over, gain = max(of(m) / m.bound for m in measured), min(m.awaited / of(m) for m in measured)
        return f"{mean(of):.2f} | {over:.2f} | {gain:.2f}"

    return (
        f"| {engine} | {ratio:g} | {mean(lambda m: m.calls):.0f} | {mean(lambda m: m.alone):.2f} "
        f"| {mean(lambda m: m.bound):.2f} | {mean(lambda m: m.awaited):.2f} | {parts(lambda m: m.early)} "
        f"| {parts(lambda m: m.last)} | {parts(lambda m: m.at_end)} |"
    )


HEAD = """\
| engine | generation / verdict | calls | alone, s | bound, s | awaited, s | early, s | / bound | awaited / it \
| last, s | / bound | awaited / it | at end, s | / bound | awaited / it |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"""

ENGINES: dict[str, Callable[[float], StreamingEngine]] = {"streaming": StreamingEngine, "waves": WaveEngine}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.25, 0.5, 1.0, 2.0])
    arguments = parser.parse_args()
    print(HEAD)
    for name, new_engine in ENGINES.items():
        for ratio in arguments.ratios:
            results = [measure(new_engine, ratio * MEAN_S, seed, asyncio.run) for seed in SEEDS]
            print(row(name, ratio, results), flush=True)


if __name__ == "__main__":
    main()
