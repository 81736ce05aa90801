"""Named tensors on their way from a trainer to engines: flat buckets of bytes in Ray's object store.

On one node the store is shared memory and nothing is copied on the way out; between nodes Ray moves a bucket
once per node, however many engines read it there.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_mappa.errors import DataError, InfrastructureError

if TYPE_CHECKING:
    import ray

BUCKET_BYTES = 64 * 2**20
ALIGNMENT = 64
"""Of every tensor in its bucket, in bytes: enough for any dtype and for a cache line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTensor:
    name: str
    shape: tuple[int, ...]
    dtype: str
    """As torch spells it, without `torch.`."""
    start: int
    """First byte in the bucket."""

    @property
    def n_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Several tensors in one array, so that they travel as one object."""

    tensors: tuple[PackedTensor, ...]
    data: NDArray[np.uint8]


def pack(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Copies `tensors` into buckets of at most `bucket_bytes`, or of one tensor that is larger.

    Each tensor is copied before the next is asked for, and the next bucket is begun when the one before has
    been taken, so that no more than one bucket of copies is alive if the caller keeps none.

    Raises `DataError` when a name comes twice.
    """
    seen: set[str] = set()
    packed: list[PackedTensor] = []
    data, used = _room(0), 0
    for name, tensor in tensors:
        if name in seen:
            raise DataError(f"tensor {name} comes twice")
        seen.add(name)
        one = PackedTensor(
            name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."), start=used
        )
        if used + one.n_bytes > len(data):
            if packed:
                yield Bucket(tensors=tuple(packed), data=data[:used])
            del data  # before the next room is made
            data, used, packed = _room(max(bucket_bytes, one.n_bytes)), 0, []
            one = PackedTensor(name=one.name, shape=one.shape, dtype=one.dtype, start=0)
        _view(data, one).copy_(tensor.detach())
        packed.append(one)
        used = -(-(one.start + one.n_bytes) // ALIGNMENT) * ALIGNMENT
        del tensor
    if packed:
        yield Bucket(tensors=tuple(packed), data=data[:used])


def unpack(bucket: Bucket) -> dict[str, Tensor]:
    """The tensors of a bucket, in the order packed: views of its memory, which must not be written to."""
    return {one.name: _view(bucket.data, one) for one in bucket.tensors}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """Tensors in Ray's object store; it may be sent to actors, which fetch them without a copy on the same node.

    They live as long as the process that stored them and somebody holds this.
    """

    refs: tuple[ray.ObjectRef[Bucket], ...]
    n_bytes: int
    """Of the tensors themselves, without what aligns them."""

    @classmethod
    def store(
        cls, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], bucket_bytes: int = BUCKET_BYTES
    ) -> StoredWeights:
        """Raises `InfrastructureError` when the object store has no room for them."""
        import ray

        items = tensors.items() if isinstance(tensors, Mapping) else tensors
        refs, n_bytes = [], 0
        for bucket in pack(items, bucket_bytes):
            try:
                refs.append(ray.put(bucket))
            except ray.exceptions.ObjectStoreFullError as error:
                raise InfrastructureError(
                    f"Ray's object store has no room for {bucket.data.nbytes} bytes of weights: "
                    "raise runtime.object_store_gb"
                ) from error
            n_bytes += sum(one.n_bytes for one in bucket.tensors)
        return cls(refs=tuple(refs), n_bytes=n_bytes)

    async def fetch(self, timeout_s: float) -> list[Bucket]:
        """The buckets, in shared memory. Raises `InfrastructureError` when one is lost or does not come in time."""
        import ray

        try:
            return await asyncio.wait_for(asyncio.gather(*self.refs), timeout_s)
        except (ray.exceptions.ObjectLostError, TimeoutError) as error:
            raise InfrastructureError(
                f"weights in Ray's object store cannot be fetched: {error or f'not there after {timeout_s:g} s'}"
            ) from error


def _room(n_bytes: int) -> NDArray[np.uint8]:
    # Memory that is never written to is never taken, so a bucket that stays small costs what it holds.
    return np.empty(-(-n_bytes // ALIGNMENT) * ALIGNMENT, dtype=np.uint8)


def _view(data: NDArray[np.uint8], one: PackedTensor) -> Tensor:
    with warnings.catch_warnings():
        # What comes from the object store is read-only, which torch cannot express.
        warnings.filterwarnings("ignore", message="The given (NumPy array|buffer) is not writ")
        flat = torch.from_numpy(data[one.start : one.start + one.n_bytes])
    return flat.view(getattr(torch, one.dtype)).view(one.shape)
