"""Weights that go to engines past the run: everything of `nccl` and `ipc` but how the bytes travel.

Here a bucket at a time is handed to each engine's actor, by the same calls of vLLM's transfer protocol.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from lightning_mappa.errors import InfrastructureError
from lightning_mappa.models.load import trained_parameters
from lightning_mappa.rollout.fingerprint import TOLERANCE, Fingerprint, probe_ids
from lightning_mappa.rollout.vllm_engine import VLLMEngine
from lightning_mappa.runtime.actor_client import ActorClient
from lightning_mappa.runtime.board_link import BoardLink
from lightning_mappa.runtime.served_weights import ServedWeights
from lightning_mappa.runtime.weight_sender import WholeWeights, send_straight
from lightning_mappa.runtime.weight_transport import pack
from lightning_mappa.strategies.zero import WholeTensors
from tests.integration.vllm_setup import (
    CONTEXT,
    VOCAB,
    change,
    fingerprint_gap,
    group,
    policy_log_probs,
    ray_cluster,
    save_model,
    trained,
)
from tests.packages import needs

pytestmark = [pytest.mark.slow, needs("vllm"), pytest.mark.timeout(600)]


class BucketSender:
    """Args: skip: so many engines, from the last, get nothing. corrupt: a tensor that is sent as zeros."""

    def __init__(self, skip: int = 0, corrupt: str = "") -> None:
        self._skip = skip
        self._corrupt = corrupt

    def send(self, tensors: WholeWeights, engines: Sequence[Any]) -> int:
        client = ActorClient(engines[: len(engines) - self._skip], 1, 120.0)
        client.start_weight_update()
        sent = ((name, torch.zeros_like(t) if name == self._corrupt else t) for name, t in tensors)
        n_bytes = 0
        for bucket in pack(sent, 10_000):
            client.update_weights({"tensors": bucket.tensors, "data": bucket.data})
            n_bytes += sum(one.n_bytes for one in bucket.tensors)
        client.finish_weight_update()
        return n_bytes


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with ray_cluster():
        yield save_model(Path(tmp_path_factory.mktemp("m")), tied=True)


@pytest.fixture
def engine(model_path: str) -> Iterator[VLLMEngine]:
    engine = VLLMEngine([group(model_path, num_engines=2)], max_restarts=1)
    try:
        yield engine
    finally:
        engine.close()


def push(engine: VLLMEngine, sender: BucketSender, model: PreTrainedModel, version: int) -> list[tuple[str, int]]:
    """Returns what the ledger was told."""
    told: list[tuple[str, int]] = []
    board: Any = SimpleNamespace(
        weights=ServedWeights(engine, {"solver": TOLERANCE["float32"]}, staged=True),
        ledger=SimpleNamespace(record_sync=lambda *fact: told.append(fact)),
        first_step=0,
        max_steps=3,
    )
    prompt_ids, token_ids = probe_ids(VOCAB, CONTEXT)
    log_probs = tuple(float(policy_log_probs(model, prompt_ids, (token,), 1.0)) for token in token_ids)
    own = Fingerprint(prompt_ids=prompt_ids, token_ids=token_ids, log_probs=log_probs)
    send_straight(BoardLink(board, "solver"), sender, version, WholeTensors(trained_parameters(model)), own)
    assert board.weights.take_sync_s() > 0
    return told


def test_what_was_sent_is_what_every_engine_serves(engine: VLLMEngine, model_path: str) -> None:
    model = trained(model_path)
    for version in (1, 2):
        tensors = change(model, version)
        assert push(engine, BucketSender(), model, version) == [("solver", version)]
        assert fingerprint_gap(engine, model, version) < 2e-3
        assert engine.sync_bytes["solver"] == sum(t.nbytes for t in tensors.values())
        assert engine.policy_version("solver") == version


def test_an_engine_that_was_left_out_is_found(engine: VLLMEngine, model_path: str) -> None:
    model = trained(model_path)
    change(model, 1)
    with pytest.raises(InfrastructureError, match="engine 1 of solver"):
        push(engine, BucketSender(skip=1), model, 1)


def test_a_corrupted_tensor_is_found(engine: VLLMEngine, model_path: str) -> None:
    model = trained(model_path)
    change(model, 1)
    with pytest.raises(InfrastructureError, match="engine 0 of solver"):
        push(engine, BucketSender(corrupt="model.layers.1.mlp.down_proj.weight"), model, 1)


def test_engines_that_refuse_say_so(engine: VLLMEngine) -> None:
    with pytest.raises(InfrastructureError, match="an engine broke off in update_weights: "):
        ActorClient(engine.actors("solver"), 1, 60.0).update_weights({"no": "such field"})


def test_a_fresh_engine_has_no_way_to_weights_that_nobody_kept(engine: VLLMEngine, model_path: str) -> None:
    import ray

    model = trained(model_path)
    change(model, 1)
    push(engine, BucketSender(), model, 1)
    ray.kill(engine.actors("solver")[0])
    with pytest.raises(InfrastructureError, match="resume from the last checkpoint"):
        fingerprint_gap(engine, model, 1)
