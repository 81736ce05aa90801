"""Engines that die, hang and break while they owe answers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from lightning_mappa.errors import InfrastructureError
from lightning_mappa.rollout.engine import Generation
from lightning_mappa.rollout.vllm_engine import VLLMEngine
from lightning_mappa.rollout.vllm_server import VLLMServer
from tests.integration.vllm_setup import (
    answers,
    change,
    fingerprint_gap,
    group,
    ray_cluster,
    request,
    save_model,
    spawn_server,
    trained,
)
from tests.packages import needs
from tests.processes import living

pytestmark = [pytest.mark.slow, needs("vllm"), pytest.mark.timeout(600)]

REQUESTS = [request(i, temperature=1.0, new=300, length=20 + i) for i in range(16)]


class FaultyServer(VLLMServer):
    """Can be told to break off its next step, as an engine does that has run out of memory."""

    async def break_next_step(self) -> None:
        def patch(engine: object) -> None:
            def step() -> None:
                raise MemoryError("planted")

            engine.step = step  # type: ignore[attr-defined]

        await self._call(patch)


class LostWeights:
    async def fetch(self, timeout_s: float) -> None:
        raise InfrastructureError("weights in Ray's object store cannot be fetched")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with ray_cluster():
        yield save_model(tmp_path_factory.mktemp("model") / "m", tied=True)


def play(engine: VLLMEngine, disturb: Callable[[], object]) -> list[Generation]:
    """All requests at once, two sessions, disturbed soon after the first have started."""

    async def run() -> list[Generation]:
        async with engine.session("a") as a, engine.session("b") as b:
            tasks = [asyncio.create_task((a, b)[i % 2].generate(one)) for i, one in enumerate(REQUESTS)]
            await asyncio.sleep(0.15)
            await asyncio.to_thread(disturb)
            assert not all(task.done() for task in tasks), "too late to disturb anything"
            return await asyncio.gather(*tasks)

    return asyncio.run(run())


def signal_first(engine: VLLMEngine, number: signal.Signals) -> Callable[[], object]:
    return lambda: os.kill(engine._groups()[0].replicas[0].pid, number)


def test_engines_that_die_and_hang_are_replaced_and_nothing_is_lost(path: str) -> None:
    """Killed, then stopped, then killed once more: two restarts are allowed and the third is not made."""
    engine = VLLMEngine([group(path, num_engines=2)], heartbeat_s=20.0, deadline_s=300, max_restarts=2)
    pids = [replica.pid for replica in engine._groups()[0].replicas]
    try:
        model = trained(path)
        engine.update_weights("solver", 4, change(model, 1))
        undisturbed = play(engine, lambda: None)

        for number, reason in ((signal.SIGKILL, "its process ended"), (signal.SIGSTOP, "no sign of life for 20 s")):
            disturbed = play(engine, signal_first(engine, number))
            pids += [replica.pid for replica in engine._groups()[0].replicas]
            assert engine.restarts[-1] == f"engine 0 of solver: {reason}"
            assert [g.response_ids for g in disturbed] == [g.response_ids for g in undisturbed]
            for one, other in zip(disturbed, undisturbed, strict=True):
                assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
            assert {g.policy_version for g in disturbed} == {4}, "a fresh engine gets weights and version"
            assert fingerprint_gap(engine, model, 4) < 2e-3
        assert len(engine.restarts) == 2

        with pytest.raises(InfrastructureError, match="2 engines were started again before, no more are allowed"):
            play(engine, signal_first(engine, signal.SIGKILL))
        for refused in (
            lambda: answers(engine, REQUESTS[:1]),
            lambda: engine.update_weights("solver", 5, {}),
            lambda: engine.fingerprints("solver", (9,), (10,)),
        ):
            with pytest.raises(InfrastructureError, match="no more are allowed"):
                refused()
    finally:
        engine.close()
    assert not psutil.wait_procs(living(pids), timeout=20)[1], "an engine outlived its driver's close"


def test_an_engine_that_breaks_in_a_step_is_replaced_and_the_reason_is_kept(path: str) -> None:
    engine = VLLMEngine([group(path)], spawn=spawn_server(FaultyServer), deadline_s=300, max_restarts=1)
    try:
        before = answers(engine, REQUESTS[:4])
        replica = engine._groups()[0].replicas[0]
        engine._wait(replica.ask("break_next_step"))
        assert [g.response_ids for g in answers(engine, REQUESTS[:4])] == [g.response_ids for g in before]
        (reason,) = engine.restarts
        assert "a decoding step raised MemoryError: planted" in reason
        engine._wait(replica.ask("break_next_step"))
        with pytest.raises(InfrastructureError, match=r"MemoryError: planted; 1 engines were started again"):
            answers(engine, REQUESTS[:4])
    finally:
        engine.close()


def test_an_episode_that_gives_up_while_an_engine_restarts_leaves_it_with_its_weights(path: str) -> None:
    """The restart belongs to nobody: who noticed the death first may be cancelled."""
    engine = VLLMEngine([group(path)], deadline_s=300, max_restarts=1)
    try:
        model = trained(path)
        engine.update_weights("solver", 1, change(model, 1))
        os.kill(engine._groups()[0].replicas[0].pid, signal.SIGKILL)

        async def give_up() -> None:
            async with engine.session("a") as a:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(a.generate(REQUESTS[0]), 1.0)

        asyncio.run(give_up())
        assert fingerprint_gap(engine, model, 1) < 2e-3
        assert len(engine.restarts) == 1
    finally:
        engine.close()


def test_weights_that_are_gone_stop_the_run_and_not_a_fresh_engine_without_them(path: str) -> None:
    engine = VLLMEngine([group(path)], deadline_s=300, max_restarts=1)
    try:
        engine.update_weights("solver", 1, change(trained(path), 1))
        engine._stored["solver"] = (1, LostWeights())  # type: ignore[assignment]
        os.kill(engine._groups()[0].replicas[0].pid, signal.SIGKILL)
        with pytest.raises(InfrastructureError, match="cannot be fetched"):
            answers(engine, REQUESTS[:1])
        with pytest.raises(InfrastructureError, match="no more are allowed"):
            answers(engine, REQUESTS[:1])
    finally:
        engine.close()


DRIVER = """
import sys, time
from tests.integration.vllm_setup import group, ray_cluster
from lightning_mappa.rollout.vllm_engine import VLLMEngine
with ray_cluster(2):
    engine = VLLMEngine([group(sys.argv[1])])
    print(engine._groups()[0].replicas[0].pid, flush=True)
    time.sleep(600)
"""


def test_a_driver_that_is_killed_leaves_no_engine_behind(tmp_path: Path) -> None:
    """Ray's own agents, which hold neither model nor port of ours, take about a minute longer to notice."""
    path = save_model(tmp_path / "m", tied=True)
    with subprocess.Popen([sys.executable, "-c", DRIVER, path], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        engine = psutil.Process(next(int(line) for line in driver.stdout if line.strip().isdigit()))
        assert engine.is_running()
        driver.kill()
    assert not psutil.wait_procs([engine], timeout=60)[1]
