"""Memory summed up: of every GPU, and of every node's host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_mappa.plan.memory import Part, When
from lightning_mappa.plan.processes import Process


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One part of one process on a device."""

    owner: str
    part: str
    bytes: int
    when: When


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU, or the host memory of a node."""

    name: str
    holdings: tuple[Holding, ...]
    capacity: int
    by_turns: bool
    """Trainers update one after the other (runtime=local), so the largest update counts and not their sum."""
    overlap: bool
    """Rollouts go on while trainers update."""

    @property
    def always(self) -> int:
        return sum(one.bytes for one in self.holdings if one.when == "always")

    @property
    def update(self) -> int:
        """What an update adds."""
        per_owner: dict[str, int] = {}
        for one in self.holdings:
            if one.when == "update":
                per_owner[one.owner] = per_owner.get(one.owner, 0) + one.bytes
        return (max if self.by_turns else sum)(per_owner.values() or [0])

    @property
    def rollout(self) -> int:
        """What a rollout adds."""
        return sum(one.bytes for one in self.holdings if one.when == "rollout")

    @property
    def peak(self) -> int:
        return self.always + (self.update + self.rollout if self.overlap else max(self.update, self.rollout))

    @property
    def fits(self) -> bool:
        return self.peak <= self.capacity

    @property
    def largest(self) -> Holding:
        """Of what is there at the peak."""
        other = "rollout" if self.update >= self.rollout else "update"
        there = (one for one in self.holdings if self.overlap or one.when != other)
        return max(there, key=lambda one: one.bytes)


def devices_of(
    processes: Sequence[Process],
    *,
    nodes: int,
    gpu_memory: int,
    node_memory: int,
    object_store: int,
    by_turns: bool,
    overlap: bool,
) -> list[Device]:
    """GPUs in order of node and number, then the nodes. `object_store` bytes lie on the first node."""

    def device(name: str, holdings: tuple[Holding, ...], capacity: int) -> Device:
        return Device(name=name, holdings=holdings, capacity=capacity, by_turns=by_turns, overlap=overlap)

    on_gpus: dict[tuple[int, int], list[Holding]] = {}
    on_nodes: dict[int, list[Holding]] = {node: [] for node in range(nodes)}
    if object_store:
        on_nodes[0].append(Holding(owner="Ray", part="object store", bytes=object_store, when="always"))
    for process in processes:
        host = on_nodes[process.node]
        own = host if process.gpu is None else on_gpus.setdefault((process.node, process.gpu), [])
        own += _holdings(process.owner, process.parts, "device")
        host += _holdings(process.owner, process.parts, "host")
    gpus = [device(f"node {node} GPU {gpu}", tuple(held), gpu_memory) for (node, gpu), held in sorted(on_gpus.items())]
    hosts = [device(f"node {node} host", tuple(held), node_memory) for node, held in on_nodes.items()]
    return gpus + hosts


def _holdings(owner: str, parts: Iterable[Part], place: str) -> list[Holding]:
    sizes = [(part, getattr(part, place)) for part in parts]
    return [Holding(owner=owner, part=part.name, bytes=size, when=part.when) for part, size in sizes if size]
