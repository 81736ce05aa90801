import asyncio
import threading
import time

import pytest

from lightning_mappa.rollout.engine import Generation, GenerationRequest, SamplingParams
from lightning_mappa.rollout.wave import WaveScheduler
from lightning_mappa.types import StopReason


class Recorder:
    """Decodes by echoing the seed, and keeps what each wave was made of."""

    def __init__(self, seconds=0.0):
        self.waves = []
        self.threads = set()
        self.seconds = seconds
        self.scheduler = WaveScheduler(self.decode)

    def decode(self, requests):
        self.waves.append([request.agent_id for request in requests])
        self.threads.add(threading.get_ident())
        time.sleep(self.seconds)
        return [
            Generation(response_ids=(one.seed,), log_probs=(0.0,), stop_reason=StopReason.STOP, policy_version=0)
            for one in requests
        ]


def request(label, seed=0):
    return GenerationRequest(agent_id=label, prompt_ids=(1,), sampling=SamplingParams(max_new_tokens=1), seed=seed)


async def episode(recorder, name, turns, tool_s=0.0):
    answers = []
    async with recorder.scheduler.session(name) as session:
        for turn in range(turns):
            generation = await session.generate(request(name, turn))
            answers.append(generation.response_ids[0])
            await asyncio.sleep(tool_s)
    return answers


def run(main):
    return asyncio.run(asyncio.wait_for(main, timeout=10))


def gather(*episodes):
    async def main():
        return await asyncio.gather(*episodes)

    return run(main())


def test_waves_hold_every_live_episode_in_order_of_episode_id():
    recorder = Recorder()
    answers = gather(episode(recorder, "c", 2), episode(recorder, "a", 3), episode(recorder, "b", 1))
    assert recorder.waves == [["a", "b", "c"], ["a", "c"], ["a"]]
    assert answers == [[0, 1], [0, 1, 2], [0]]
    assert threading.get_ident() not in recorder.threads


@pytest.mark.parametrize("slow", ["a", "b"])
def test_a_running_tool_holds_the_wave_back(slow):
    recorder = Recorder()
    gather(*(episode(recorder, name, 3, tool_s=0.03 if name == slow else 0.0) for name in "ab"))
    assert recorder.waves == [["a", "b"]] * 3


def test_other_coroutines_run_while_a_wave_decodes():
    recorder = Recorder(seconds=0.2)

    async def main():
        decoding = asyncio.create_task(episode(recorder, "a", 1))
        ticks = 0
        while not decoding.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return ticks

    assert run(main()) > 5


def test_an_episode_that_follows_in_the_same_slot_joins_the_next_wave():
    recorder = Recorder()

    async def slot(*names):
        for name in names:
            await episode(recorder, name, 1)

    gather(slot("a", "b", "c"), episode(recorder, "z", 3))
    assert recorder.waves == [["a", "z"], ["b", "z"], ["c", "z"]]


def test_an_error_reaches_every_waiting_session_and_the_next_wave_works():
    recorder = Recorder()
    decode, failures = recorder.decode, [RuntimeError("decoder lost")]

    def broken(requests):
        if failures:
            raise failures.pop()
        return decode(requests)

    recorder.scheduler = WaveScheduler(broken)

    async def main():
        failed = await asyncio.gather(*(episode(recorder, name, 1) for name in "abc"), return_exceptions=True)
        return failed, await episode(recorder, "d", 1)

    failed, after = run(main())
    assert [str(error) for error in failed] == ["decoder lost"] * 3
    assert after == [0]


def test_a_session_that_closes_without_asking_releases_the_others():
    recorder = Recorder()

    async def leaves():
        async with recorder.scheduler.session("quiet"):
            await asyncio.sleep(0.02)
            raise KeyError("quiet")

    async def main():
        return await asyncio.gather(episode(recorder, "a", 1), leaves(), return_exceptions=True)

    answers, error = run(main())
    assert (answers, str(error)) == ([0], "'quiet'")
    assert recorder.waves == [["a"]]


def test_a_cancelled_episode_leaves_its_wave():
    recorder = Recorder(seconds=0.1)

    async def main():
        tasks = [asyncio.create_task(episode(recorder, name, 2)) for name in "ab"]
        await asyncio.sleep(0.03)
        tasks[0].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    cancelled, answers = run(main())
    assert isinstance(cancelled, asyncio.CancelledError)
    assert answers == [0, 1]
    assert recorder.waves == [["a", "b"], ["b"]]


def test_an_episode_that_opens_during_a_wave_is_in_the_next_one():
    recorder = Recorder(seconds=0.05)

    async def later():
        await asyncio.sleep(0.02)
        await episode(recorder, "b", 1)

    gather(episode(recorder, "a", 2), later())
    assert recorder.waves == [["a"], ["a", "b"]]


def test_misuse_is_refused():
    recorder = Recorder(seconds=0.05)

    async def twice_open():
        async with recorder.scheduler.session("a"), recorder.scheduler.session("a"):
            pass

    async def asks_twice():
        async with recorder.scheduler.session("b") as session:
            await asyncio.gather(session.generate(request("x")), session.generate(request("y")))

    with pytest.raises(ValueError, match="'a' has an open session"):
        run(twice_open())
    with pytest.raises(RuntimeError, match="second generation for 'y'"):
        run(asks_twice())
