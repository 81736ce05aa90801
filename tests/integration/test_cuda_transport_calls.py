"""What the Trainer's side of `nccl` and `ipc` asks of engines; the transfer itself is tested on GPUs (tests/gpu)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

from lightning_mappa.errors import ConfigError
from tests.integration.vllm_setup import ray_cluster
from tests.packages import needs

pytestmark = [pytest.mark.slow, needs("vllm")]


class Recorder:
    """Takes the calls that a `VLLMServer` takes."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def transfer(self, method: str, payload: Any = None) -> None:
        self.calls.append((method, payload))

    def all(self) -> list[tuple[str, Any]]:
        return self.calls


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_cluster(2):
        yield


def recorders(count: int) -> list[Any]:
    import ray

    return [ray.remote(Recorder).options(num_cpus=0).remote() for _ in range(count)]


def test_every_engine_gets_ranks_of_its_own_behind_the_sender(cluster: None) -> None:
    import ray

    from lightning_mappa.runtime.actor_client import ActorClient

    actors = recorders(3)
    client = ActorClient(actors, 2, 120.0)
    client.init_weight_transfer_engine({"rank_offset": 1, "world_size": 7})
    client.start_weight_update()
    client.update_weights({"names": ["w"]})
    client.finish_weight_update()
    heard = ray.get([actor.all.remote() for actor in actors])
    assert [calls[0][1]["rank_offset"] for calls in heard] == [1, 3, 5]
    for calls in heard:
        assert [method for method, _ in calls] == [
            "init_weight_transfer_engine",
            "start_weight_update",
            "update_weights",
            "finish_weight_update",
        ]
        assert calls[2][1] == {"names": ["w"]}


def test_the_source_tells_shapes_without_reading_a_tensor() -> None:
    from lightning_mappa.runtime.cuda_transport import TensorSource

    class Unread:
        shapes: ClassVar = {"w": (2, 3)}

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            raise AssertionError("a tensor was put together")

    source = TensorSource(Unread(), torch.bfloat16)
    (meta,) = source.metadata()
    assert (meta.name, meta.dtype, meta.shape) == ("w", torch.bfloat16, (2, 3))
    assert source.n_bytes == 12


def test_a_transport_that_is_none_of_vllms_is_refused() -> None:
    from lightning_mappa.runtime.cuda_transport import CudaSender

    with pytest.raises(ConfigError, match="allowed on CUDA are nccl and ipc"):
        CudaSender("carrier_pigeon", torch.float32, rank=0, ranks_per_engine=1, timeout_s=1.0)
