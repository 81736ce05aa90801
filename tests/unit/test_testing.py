import asyncio

import pytest
import torch

from lightning_mappa.rollout.engine import GenerationRequest, SamplingParams
from lightning_mappa.testing import ScriptedCoach, ScriptedEngine, char_tokenizer
from lightning_mappa.types import Episode, StopReason, Task

TOKENIZER = char_tokenizer()


async def ask(engine, text, max_new_tokens=20):
    request = GenerationRequest(
        agent_id="solver",
        prompt_ids=tuple(TOKENIZER.encode(text)),
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
        seed=0,
    )
    async with engine.session("e0") as session:
        return await session.generate(request)


@pytest.mark.parametrize(
    ("limit", "text", "reason"),
    [(20, "x2<|end|>", StopReason.STOP), (3, "x2<|end|>", StopReason.STOP), (2, "x2", StopReason.LENGTH)],
)
def test_scripted_engine_answers_with_the_script(limit, text, reason):
    engine = ScriptedEngine(lambda request, prompt: prompt.removeprefix("<|user|>") + "2", TOKENIZER)
    answer = asyncio.run(ask(engine, "<|user|>x", limit))
    assert TOKENIZER.decode(answer.response_ids) == text
    assert answer.stop_reason is reason
    assert answer.log_probs == (0.0,) * len(answer.response_ids)
    assert [one.agent_id for one in engine.requests] == ["solver"]


def test_scripted_engine_counts_versions():
    engine = ScriptedEngine(lambda request, prompt: "", TOKENIZER)
    assert engine.policy_version("solver") == 0
    engine.update_weights("solver", 4, {"w": torch.ones(1)})
    assert engine.policy_version("solver") == asyncio.run(ask(engine, "x")).policy_version == 4
    assert engine.weights["solver"]["w"].item() == 1


def test_scripted_coach_scores_or_misses():
    episode = Episode(id="e", task=Task(id="t", kind="k", prompt="p"), actions=())
    coach = ScriptedCoach(lambda episode, index: [7.0, None][index])
    verdicts = [asyncio.run(coach.score(episode, index)) for index in range(2)]
    assert [one.score for one in verdicts] == [7.0, None]
    assert [one.coach for one in verdicts] == ["scripted"] * 2
    assert verdicts[1].reason
