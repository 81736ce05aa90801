"""Packing tensors into buckets, and Ray's object store as their way to other processes."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_mappa.errors import DataError, InfrastructureError
from lightning_mappa.runtime.weight_transport import ALIGNMENT, PackedTensor, StoredWeights, pack, unpack


def named(count: int = 5) -> dict[str, Tensor]:
    """Odd sizes, several dtypes, one scalar, one empty, one that is not contiguous."""
    generator = torch.Generator().manual_seed(0)
    tensors = {f"w{i}": torch.randn(i + 3, 7, generator=generator) for i in range(count)}
    return tensors | {
        "half": torch.randn(3, 5, generator=generator).to(torch.bfloat16),
        "double": torch.randn(9, generator=generator, dtype=torch.float64),
        "ids": torch.arange(5),
        "flag": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "turned": torch.randn(4, 6, generator=generator).T,
    }


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert list(left) == list(right)
    for name, tensor in left.items():
        assert right[name].dtype == tensor.dtype
        assert torch.equal(right[name], tensor), name


@pytest.mark.parametrize("bucket_bytes", [1, 100, 10_000])
def test_what_is_packed_comes_out_the_same(bucket_bytes: int) -> None:
    out: dict[str, Tensor] = {}
    for bucket in pack(named().items(), bucket_bytes):
        out |= unpack(bucket)
    assert_same(named(), out)


def test_a_bucket_keeps_to_its_limit_unless_it_holds_one_tensor() -> None:
    buckets = list(pack(named().items(), 200))
    assert len(buckets) > 3
    for bucket in buckets:
        filled = [one for one in bucket.tensors if one.n_bytes]
        assert bucket.data.nbytes <= 256 or len(filled) == 1
        assert all(one.start % ALIGNMENT == 0 for one in bucket.tensors)


def test_tensors_of_a_bucket_share_its_memory() -> None:
    (bucket,) = pack([("a", torch.zeros(4)), ("b", torch.zeros(4))])
    tensors = unpack(bucket)
    bucket.data[:] = np.frombuffer(np.full(len(bucket.data) // 4, 3.0, dtype=np.float32), dtype=np.uint8)
    assert tensors["a"].tolist() == tensors["b"].tolist() == [3.0] * 4


def test_tensors_are_copied_one_at_a_time_and_one_bucket_is_alive() -> None:
    events: list[str] = []

    def source() -> Iterator[tuple[str, Tensor]]:
        for i in range(6):
            events.append(f"asked {i}")
            tensor = torch.full((64,), float(i))
            yield f"t{i}", tensor
            tensor.zero_()  # as a gathered shard is freed: too late to be seen

    alive: list[weakref.ref[Any]] = []
    values = []
    for bucket in pack(source(), 512):
        gc.collect()
        assert not [one for one in alive if one() is not None], "an earlier bucket is still held"
        events.append("bucket")
        values += [float(t[0]) for t in unpack(bucket).values()]
        alive.append(weakref.ref(bucket.data.base if bucket.data.base is not None else bucket.data))
        del bucket
    assert values == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert events[:4] == ["asked 0", "asked 1", "asked 2", "bucket"]


def test_a_name_that_comes_twice_is_refused() -> None:
    with pytest.raises(DataError, match="w comes twice"):
        list(pack([("w", torch.zeros(1)), ("w", torch.zeros(1))]))


def test_read_only_memory_is_unpacked_without_a_warning() -> None:
    (bucket,) = pack([("a", torch.arange(4.0))])
    bucket.data.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert unpack(bucket)["a"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_sizes_are_those_of_the_tensors() -> None:
    one = PackedTensor(name="a", shape=(3, 5), dtype="bfloat16", start=0)
    assert one.n_bytes == 30
    assert PackedTensor(name="s", shape=(), dtype="float64", start=0).n_bytes == 8


def test_importing_it_brings_in_neither_ray_nor_vllm() -> None:
    code = (
        "import sys, lightning_mappa.runtime.weight_transport\n"
        "assert not {'ray', 'vllm'} & set(sys.modules), 'imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=1, object_store_memory=80 * 2**20, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_another_process_reads_the_same_tensors_without_a_copy(cluster: None) -> None:
    import ray

    @ray.remote
    def read(weights: StoredWeights) -> tuple[dict[str, float], bool]:
        buckets = asyncio.run(weights.fetch(10.0))
        owned = any(bucket.data.flags.owndata or bucket.data.flags.writeable for bucket in buckets)
        return {name: float(t.double().sum()) for b in buckets for name, t in unpack(b).items()}, owned

    stored = StoredWeights.store(named(), 200)
    sums, owned = ray.get(read.remote(stored), timeout=60)
    assert len(stored.refs) > 3
    assert stored.n_bytes == sum(t.numel() * t.element_size() for t in named().values())
    assert sums == {name: float(t.double().sum()) for name, t in named().items()}
    assert not owned, "the store's own memory is read"


def test_a_store_without_room_names_the_key(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def full(value: object) -> None:
        raise ray.exceptions.ObjectStoreFullError("full")

    monkeypatch.setattr(ray, "put", full)
    with pytest.raises(InfrastructureError, match=r"runtime\.object_store_gb"):
        StoredWeights.store({"a": torch.zeros(3)})


def test_weights_that_are_gone_are_an_infrastructure_error(cluster: None) -> None:
    import ray

    class Owner:
        def store(self) -> StoredWeights:
            return StoredWeights.store({"a": torch.zeros(1000)})

    owner: Any = ray.remote(Owner).remote()
    stored = ray.get(owner.store.remote(), timeout=60)
    assert len(asyncio.run(stored.fetch(10.0))) == 1
    ray.kill(owner)
    deadline = time.monotonic() + 20

    def fetch_until_it_is_noticed() -> None:
        while time.monotonic() < deadline:
            asyncio.run(stored.fetch(1.0))

    with pytest.raises(InfrastructureError, match="cannot be fetched"):
        fetch_until_it_is_noticed()
