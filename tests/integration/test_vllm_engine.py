"""Fully trained agents on vLLM engines in Ray actors: real engines, a small model, tied and untied."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import torch
from transformers import PreTrainedModel

from lightning_mappa.errors import InfrastructureError
from lightning_mappa.rollout.engine import Generation, SamplingParams
from lightning_mappa.rollout.vllm_engine import VLLMEngine
from lightning_mappa.rollout.vllm_server import VLLMServer
from lightning_mappa.runtime.weight_transport import StoredWeights
from lightning_mappa.types import StopReason
from tests.integration.vllm_setup import (
    CONTEXT,
    EOS,
    answers,
    change,
    fingerprint_gap,
    group,
    largest_gap,
    ray_cluster,
    request,
    save_model,
    spawn_server,
    trained,
    trainer_log_probs,
)
from tests.packages import needs
from tests.processes import living

pytestmark = [pytest.mark.slow, needs("vllm"), pytest.mark.timeout(600)]


@dataclass
class Served:
    engine: VLLMEngine
    model: PreTrainedModel
    version: int = 0

    def train(self) -> None:
        self.version += 1
        self.engine.update_weights("solver", self.version, change(self.model, self.version))


class ForgetfulServer(VLLMServer):
    """Can be told to leave out the part of an update that packs a tied head again."""

    async def set_repacking(self, on: bool) -> None:
        from lightning_mappa.rollout import object_store_transfer as transfer

        if not hasattr(self, "repack"):
            self.repack = transfer.repack_kept_weights
        setattr(transfer, "repack_kept_weights", self.repack if on else lambda model: None)  # noqa: B010


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_cluster():
        yield


@pytest.fixture(scope="module", params=["tied", "untied"])
def served(request: pytest.FixtureRequest, cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two engines; every test leaves them at `version`, with the weights of `model`."""
    path = save_model(tmp_path_factory.mktemp("model") / request.param, tied=request.param == "tied")
    engine = VLLMEngine([group(path, num_engines=2)], deadline_s=120, spawn=spawn_server(ForgetfulServer))
    yield Served(engine=engine, model=trained(path))
    engine.close()


def test_log_probs_are_the_trainers_at_every_temperature_before_and_after_updates(served: Served) -> None:
    requests = [request(i, temperature=t) for i, t in enumerate([0.0, 0.7, 1.0, 1.3] * 3)]
    for _ in range(3):
        generations = answers(served.engine, requests)
        assert {g.policy_version for g in generations} == {served.version}
        assert all(g.log_probs for g in generations)
        assert largest_gap(served.model, requests, generations) < 1e-3
        served.train()


def test_updates_change_what_is_served(served: Served) -> None:
    """Guards the test above: a model that never moved would pass it too."""
    requests = [request(i, temperature=1.0) for i in range(4)]
    before = answers(served.engine, requests)
    served.train()
    assert largest_gap(served.model, requests, before) > 0.3


def test_greedy_takes_the_likeliest_token_of_the_model(served: Served) -> None:
    one = request(1, temperature=0.0, new=12)
    (generation,) = answers(served.engine, [one])
    ids = torch.tensor([list(one.prompt_ids + generation.response_ids)])
    with torch.no_grad():
        likeliest = served.model(ids).logits[0].argmax(-1)[len(one.prompt_ids) - 1 : -1]
    assert likeliest.tolist() == list(generation.response_ids)


def test_the_same_seed_draws_the_same_tokens_whatever_else_is_in_the_batch(served: Served) -> None:
    requests = [request(i, temperature=1.0, new=40, length=10 + 7 * i) for i in range(12)]
    together = answers(served.engine, requests)
    for one, generation in zip(requests[:4], together[:4], strict=True):
        (alone,) = answers(served.engine, [one])
        assert alone.response_ids == generation.response_ids
        assert alone.log_probs == pytest.approx(generation.log_probs, abs=1e-4)
    other = answers(served.engine, [replace(requests[0], seed=1)])
    assert other[0].response_ids != together[0].response_ids


def test_more_prompt_tokens_than_one_step_takes_are_computed_whole(served: Served) -> None:
    """Part of a seeded prompt breaks vLLM's step on CPU; here the prompts have 9,600 tokens, a step takes 2,048."""
    requests = [request(i, temperature=1.0, new=8, length=400) for i in range(24)]
    generations = answers(served.engine, requests)
    assert served.engine.restarts == []
    assert largest_gap(served.model, requests, generations) < 1e-3
    (alone,) = answers(served.engine, requests[-1:])
    assert alone.response_ids == generations[-1].response_ids


def test_a_response_ends_with_the_agents_stop_id_and_no_other(served: Served) -> None:
    """The model's own folder names another end-of-turn id, which is a token like any other here."""
    requests = [request(i, temperature=1.0, new=300) for i in range(24)]
    generations = answers(served.engine, requests)
    stopped = [g for g in generations if g.stop_reason is StopReason.STOP]
    assert len(stopped) > 2
    for g in generations:
        assert len(g.log_probs) == len(g.response_ids)
        assert EOS not in g.response_ids[:-1]
        assert (g.response_ids[-1] == EOS) == (g.stop_reason is StopReason.STOP)
        assert g.stop_reason is StopReason.STOP or len(g.response_ids) == 300
    assert any(7 in g.response_ids[:-1] for g in generations), "the folder's own id was never drawn"


def test_requests_are_taken_while_others_are_in_flight(served: Served) -> None:
    async def play() -> tuple[float, float]:
        async with served.engine.session("long") as long, served.engine.session("pad"), served.engine.session("s") as s:
            assert long._replicas == s._replicas  # type: ignore[attr-defined]  # one engine for both
            start = time.monotonic()
            # Several, as any one of them may happen to end its turn early.
            slow = [
                asyncio.create_task(long.generate(request(seed, temperature=1.3, new=400, length=30)))
                for seed in range(10, 18)
            ]
            await asyncio.sleep(0.1)
            await s.generate(request(2, new=2))
            quick_s = time.monotonic() - start
            assert not all(task.done() for task in slow)
            await asyncio.gather(*slow)
            return quick_s, time.monotonic() - start

    quick_s, slow_s = asyncio.run(play())
    assert quick_s < slow_s


def test_sessions_are_spread_over_the_engines_and_keep_to_theirs(served: Served) -> None:
    async def play() -> None:
        async with served.engine.session("a") as a, served.engine.session("b") as b:
            homes = [next(iter(s._replicas.values())).name for s in (a, b)]  # type: ignore[attr-defined]
            assert sorted(homes) == ["engine 0 of solver", "engine 1 of solver"]
            async with served.engine.session("c"), served.engine.session("d"):
                assert served.engine._groups()[0].sessions == [2, 2]
            await a.generate(request(1, new=2))
            await a.generate(request(2, new=2))
        assert served.engine._groups()[0].sessions == [0, 0]

    asyncio.run(play())


def test_fingerprints_pass_after_several_updates(served: Served) -> None:
    for _ in range(3):
        assert fingerprint_gap(served.engine, served.model, served.version) < 2e-3
        served.train()


def test_fingerprints_are_right_while_others_are_in_flight(served: Served) -> None:
    requests = [request(i, temperature=1.0, new=200) for i in range(6)]

    async def play() -> None:
        async with served.engine.session("a") as a, served.engine.session("b") as b:
            tasks = [asyncio.create_task((a, b)[i % 2].generate(r)) for i, r in enumerate(requests)]
            await asyncio.sleep(0.05)
            gap = await asyncio.to_thread(fingerprint_gap, served.engine, served.model, served.version)
            assert gap < 2e-3
            assert largest_gap(served.model, requests, await asyncio.gather(*tasks)) < 1e-3

    asyncio.run(play())


def test_one_corrupted_tensor_is_noticed(served: Served) -> None:
    served.version += 1
    tensors = change(served.model, served.version)
    name = "model.layers.1.mlp.down_proj.weight"
    served.engine.update_weights("solver", served.version, tensors | {name: tensors[name] * 1.5})
    with pytest.raises(InfrastructureError, match=r"engine 0 of solver differs from the trainer by"):
        fingerprint_gap(served.engine, served.model, served.version)
    served.engine.update_weights("solver", served.version, tensors)
    assert fingerprint_gap(served.engine, served.model, served.version) < 2e-3


def test_a_tied_head_that_keeps_its_old_weights_is_noticed(served: Served) -> None:
    """As vLLM's own reload leaves it on CPU: the head multiplies with what was packed at the start."""
    replicas = served.engine._groups()[0].replicas
    for replica in replicas:
        served.engine._wait(replica.ask("set_repacking", False))
    served.train()
    tied = served.model.config.tie_word_embeddings
    with pytest.raises(InfrastructureError, match="differs from the trainer by") if tied else nullcontext():
        fingerprint_gap(served.engine, served.model, served.version)
    for replica in replicas:
        served.engine._wait(replica.ask("set_repacking", True))
    served.train()
    assert fingerprint_gap(served.engine, served.model, served.version) < 2e-3


def test_one_engine_of_two_that_was_skipped_is_noticed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    skipped = served.engine._groups()[0].replicas[1]

    async def skip(method: str, agent_id: str, version: int, *args: object, **kwargs: object) -> int:
        return version

    with monkeypatch.context() as patch:
        patch.setattr(skipped, "ask", skip)
        served.train()
    with pytest.raises(InfrastructureError, match=rf"engine 1 of solver serves version {served.version - 1} and not"):
        fingerprint_gap(served.engine, served.model, served.version)

    # Also one that says it has the version.
    ask = skipped.ask

    async def claim(method: str, agent_id: str, version: int, weights: object, timeout_s: float) -> int:
        answer: int = await ask(method, agent_id, version, None, timeout_s)
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(skipped, "ask", claim)
        served.train()
    with pytest.raises(InfrastructureError, match=r"engine 1 of solver differs from the trainer by"):
        fingerprint_gap(served.engine, served.model, served.version)
    served.train()
    assert fingerprint_gap(served.engine, served.model, served.version) < 2e-3


@pytest.mark.parametrize("fault", ["missing", "unknown", "misshapen"])
def test_a_faulty_set_of_tensors_is_refused_and_the_old_weights_stay(served: Served, fault: str) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors = {n: t.clone().zero_() for n, t in change(trained_copy(served.model), 1).items()}
    if fault == "missing":
        del tensors[name]
    elif fault == "unknown":
        tensors["model.layers.9.weight"] = torch.zeros(2)
    else:
        tensors[name] = torch.zeros(3, 5)
    with pytest.raises(InfrastructureError, match=f"{fault if fault != 'misshapen' else 'has shape'}"):
        served.engine.update_weights("solver", served.version + 1, tensors)
    assert served.engine.policy_version("solver") == served.version
    assert fingerprint_gap(served.engine, served.model, served.version) < 2e-3
    assert served.engine.restarts == []


def trained_copy(model: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(model)


def test_an_update_with_requests_in_flight_keeps_their_log_probs_honest(served: Served) -> None:
    """What was drawn before has the old weights' log-probs, what comes after has the new ones'."""
    old = trained_copy(served.model)
    requests = [request(i, temperature=1.3, new=450) for i in range(16)]

    async def play() -> list[Generation]:
        async with served.engine.session("a") as a, served.engine.session("b") as b:
            tasks = [asyncio.create_task((a, b)[i % 2].generate(r)) for i, r in enumerate(requests)]
            await asyncio.sleep(0.1)
            await asyncio.to_thread(served.train)
            return await asyncio.gather(*tasks)

    crossed = 0
    for one, generation in zip(requests, asyncio.run(play()), strict=True):
        before, after = (
            [abs(own - log_prob) < 1e-3 for own, log_prob in zip(owns, generation.log_probs, strict=True)]
            for owns in (trainer_log_probs(model, one, generation) for model in (old, served.model))
        )
        switch = before.index(False) if False in before else len(before)
        assert all(after[switch:])
        if 0 < switch < len(before):
            assert not all(after[:switch])
            assert generation.policy_version == served.version - 1, "the oldest of its tokens"
            crossed += 1
    assert crossed > 0


def test_a_stored_set_of_weights_is_taken_as_it_is_and_sizes_are_kept(served: Served) -> None:
    served.version += 1
    stored = StoredWeights.store(change(served.model, served.version))
    served.engine.update_weights("solver", served.version, stored)
    assert fingerprint_gap(served.engine, served.model, served.version) < 2e-3
    assert served.engine.sync_bytes["solver"] == sum(p.numel() * 4 for p in served.model.parameters())
    assert 0 < served.engine.sync_s["solver"] < 30


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"agent_id": "nobody"}, r"'nobody' is not served; served are \['solver'\]"),
        ({"prompt_ids": ()}, "0 prompt tokens and 24 new ones do not fit"),
        ({"prompt_ids": (9,) * (CONTEXT - 23)}, f"at most {CONTEXT} together"),
        ({"sampling": SamplingParams(max_new_tokens=0)}, "20 prompt tokens and 0 new ones"),
        ({"sampling": SamplingParams(max_new_tokens=4, temperature=2.5)}, r"temperature is 2\.5"),
        ({"sampling": SamplingParams(max_new_tokens=4, temperature=0.001)}, r"temperature is 0\.001"),
        ({"prompt_ids": (10_000,)}, "a prompt id is not in 0 to 159"),
    ],
)
def test_a_request_that_cannot_be_served_fails_alone(served: Served, fault: dict[str, object], message: str) -> None:
    with pytest.raises(InfrastructureError, match=message):
        answers(served.engine, [replace(request(1), **fault)])  # type: ignore[arg-type]
    assert len(answers(served.engine, [request(1, new=3)])[0].response_ids) > 0
    assert served.engine.restarts == []


def test_the_context_can_be_filled_to_the_last_token(served: Served) -> None:
    one = request(1, length=CONTEXT - 1, new=1)
    (generation,) = answers(served.engine, [one])
    assert len(generation.response_ids) == 1


def test_an_abandoned_request_is_taken_back(served: Served) -> None:
    async def play() -> None:
        async with served.engine.session("a") as a:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(a.generate(request(1, temperature=1.3, new=400)), 0.2)

    start = time.monotonic()
    asyncio.run(play())
    assert time.monotonic() - start < 5
    assert len(answers(served.engine, [request(2, new=4)])[0].response_ids) > 0


def test_closed_engines_leave_no_process_and_refuse(cluster: None, tmp_path: Path) -> None:
    path = save_model(tmp_path / "m", tied=True)
    engine = VLLMEngine([group(path)])
    pid = engine._groups()[0].replicas[0].pid
    assert psutil.pid_exists(pid)
    engine.close()
    engine.close()
    psutil.wait_procs(living([pid]), timeout=20)
    assert not psutil.pid_exists(pid)
    for refused in (
        lambda: answers(engine, [request(1)]),
        lambda: engine.update_weights("solver", 1, {}),
        lambda: engine.policy_version("solver"),
    ):
        with pytest.raises(InfrastructureError, match="closed"):
            refused()


def test_a_model_that_is_not_there_is_named(cluster: None, tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match=r"engine 0 of solver cannot be started: .*nowhere"):
        VLLMEngine([group(str(tmp_path / "nowhere"))])
