"""Where ranks and engines of a run go: how many of each, what each takes, and on which GPU of a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from omegaconf import DictConfig

from lightning_mappa.errors import ConfigError
from lightning_mappa.shared_weights import roles_of

CPU_SHARE = 0.01
"""Of a part that has no GPU: all of them fit on two cores, which they share by time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentNeeds:
    """What decides where an agent's ranks and engine go."""

    agent_id: str
    trained: bool
    devices: int
    """Ranks; of a frozen agent nobody asks."""
    num_engines: int
    tensor_parallel_size: int
    model_path: str
    dtype: str
    lora: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The machines there are, all alike. No GPUs: everything runs on the CPU."""

    nodes: int = 1
    gpus_per_node: int = 0

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """What one process takes."""

    cpus: float
    gpus: float
    """1, a share of one where several processes are on it, 0 on the CPU."""
    slot: int
    """Number of the GPU among those that the run takes, or of the place on the CPU. Processes on the same slot
    belong into one bundle of a Ray placement group, which keeps them on one GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPlacement:
    """A trained agent."""

    agent_id: str
    ranks: tuple[Bundle, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlacement:
    """One replica of an engine that serves a group of agents."""

    group: tuple[str, ...]
    replica: int
    bundles: tuple[Bundle, ...]
    """One per tensor-parallel worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    agents: tuple[AgentPlacement, ...]
    engines: tuple[EnginePlacement, ...]
    strategy: str = "PACK"
    """Ray's word for: on as few nodes as possible."""

    @property
    def slots(self) -> tuple[Mapping[str, float], ...]:
        """Resources per slot, in the form and order of the bundles of one Ray placement group."""
        cpus: dict[int, float] = {}
        for bundle in self.bundles:
            cpus[bundle.slot] = cpus.get(bundle.slot, 0.0) + bundle.cpus
        on_gpu = {bundle.slot for bundle in self.bundles if bundle.gpus}
        # The whole GPU whatever the shares add up to: 3 × 0.3333 would leave a rest for somebody else.
        return tuple({"CPU": cpus[slot]} | ({"GPU": 1.0} if slot in on_gpu else {}) for slot in sorted(cpus))

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        parts = (*(agent.ranks for agent in self.agents), *(engine.bundles for engine in self.engines))
        return tuple(bundle for part in parts for bundle in part)


def agent_needs(cfg: DictConfig) -> tuple[AgentNeeds, ...]:
    return tuple(
        AgentNeeds(
            agent_id=agent_id,
            trained=agent.trained,
            devices=agent.devices,
            num_engines=agent.num_engines,
            tensor_parallel_size=agent.tensor_parallel_size,
            model_path=agent.model.path,
            dtype=agent.model.dtype,
            lora=agent.model.lora is not None,
        )
        for agent_id, agent in ((agent_id, cfg.agents[agent_id]) for agent_id in roles_of(cfg.agents))
    )


def engine_groups(agents: Sequence[AgentNeeds]) -> tuple[tuple[str, ...], ...]:
    """Agents that one engine serves, in the order of their first member.

    Adapters of one base lie on one engine, and so do frozen agents with the same weights; an agent whose weights
    are all trained has one of its own.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for agent in agents:
        kind = "adapters" if agent.lora else "trained" if agent.trained else "frozen"
        key = (kind, agent.agent_id) if kind == "trained" else (kind, agent.model_path, agent.dtype)
        groups.setdefault(key, []).append(agent.agent_id)
    return tuple(tuple(group) for group in groups.values())


def place(
    agents: Sequence[AgentNeeds], cluster: Cluster, *, colocate: bool = False, one_engine: bool = False
) -> Placement:
    """One bundle per rank and per worker of an engine, engines by group.

    `one_engine` is for engine=transformers: a single process, on the CPU, that serves all agents.
    `colocate` puts the ranks of every trained agent and the engine that serves it on the same GPUs, in equal
    shares: a half each for an agent with an engine of its own.

    Raises:
        ConfigError: there are too few GPUs, workers of one engine would lie on two nodes, members of a group ask
            for different engines, or ranks and engine that should share GPUs do not need as many.
    """
    if one_engine:
        return _with_one_engine(agents, cluster)
    by_id = {agent.agent_id: agent for agent in agents}
    taken = _Slots(cluster)
    ranks: dict[str, tuple[Bundle, ...]] = {}
    engines: list[EnginePlacement] = []
    for group in engine_groups(agents):
        members = [by_id[agent_id] for agent_id in group]
        replicas, workers = _engines_of(members, cluster)
        trained = [agent for agent in members if agent.trained]
        if colocate and trained:
            _check_shared(trained, replicas, workers)
            # Shares that round down never ask for more than the one GPU.
            share = int(1e4 / (1 + len(trained))) / 1e4
            shared = taken.next(replicas * workers, share)
            ranks |= {agent.agent_id: shared for agent in trained}
            served = shared
        else:
            ranks |= {agent.agent_id: taken.next(agent.devices) for agent in trained}
            served = taken.next(replicas * workers)
        engines += [
            EnginePlacement(group=group, replica=number, bundles=served[number * workers : (number + 1) * workers])
            for number in range(replicas)
        ]
    _check_enough(taken.count, cluster, colocate)
    return Placement(
        agents=tuple(AgentPlacement(agent_id=one.agent_id, ranks=ranks[one.agent_id]) for one in agents if one.trained),
        engines=tuple(engines),
    )


def lay_out(placement: Placement, cluster: Cluster) -> Mapping[int, tuple[int, int]]:
    """Slot → (node, GPU), in order; the workers of one engine are kept on one node.

    What Ray makes of it may differ in the numbers, not in what shares a GPU. Empty on the CPU.
    """
    if not cluster.gpus:
        return {}
    tied: dict[int, int] = {}
    """First slot of an engine → its workers."""
    for engine in placement.engines:
        tied[engine.bundles[0].slot] = len(engine.bundles)
    places: dict[int, tuple[int, int]] = {}
    free = [cluster.gpus_per_node] * cluster.nodes
    slot, n_slots = 0, len(placement.slots)
    on_gpu = {bundle.slot for bundle in placement.bundles if bundle.gpus}
    while slot < n_slots and slot in on_gpu:
        size = tied.get(slot, 1)
        node = next((node for node, count in enumerate(free) if count >= size), None)
        if node is None:
            raise ConfigError(
                f"an engine with tensor_parallel_size={size} finds no node with so many GPUs free: "
                "lower agents.*.tensor_parallel_size or add nodes"
            )
        for offset in range(size):
            places[slot + offset] = (node, cluster.gpus_per_node - free[node])
            free[node] -= 1
        slot += size
    return places


def _with_one_engine(agents: Sequence[AgentNeeds], cluster: Cluster) -> Placement:
    taken = _Slots(cluster)
    ranks = tuple(
        AgentPlacement(agent_id=agent.agent_id, ranks=taken.next(agent.devices)) for agent in agents if agent.trained
    )
    _check_enough(taken.count, cluster, colocate=True)
    engine = Bundle(cpus=CPU_SHARE, gpus=0.0, slot=taken.count)
    group = tuple(agent.agent_id for agent in agents)
    return Placement(agents=ranks, engines=(EnginePlacement(group=group, replica=0, bundles=(engine,)),))


class _Slots:
    """Hands out slots in order."""

    def __init__(self, cluster: Cluster) -> None:
        self.count = 0
        self._on_gpu = cluster.gpus > 0

    def next(self, count: int, share: float = 1.0) -> tuple[Bundle, ...]:
        first, self.count = self.count, self.count + count
        cpus, gpus = (share, share) if self._on_gpu else (CPU_SHARE, 0.0)
        return tuple(Bundle(cpus=cpus, gpus=gpus, slot=slot) for slot in range(first, self.count))


def _engines_of(members: Sequence[AgentNeeds], cluster: Cluster) -> tuple[int, int]:
    """(replicas, workers of each) that all members of a group agree on."""
    first = members[0]
    for other in members[1:]:
        for name in ("num_engines", "tensor_parallel_size"):
            if getattr(first, name) != getattr(other, name):
                raise ConfigError(
                    f"agents.{first.agent_id}.{name} is {getattr(first, name)} and agents.{other.agent_id}.{name} is "
                    f"{getattr(other, name)}, but one engine serves both: set them alike"
                )
    workers = first.tensor_parallel_size
    if cluster.gpus and workers > cluster.gpus_per_node:
        raise ConfigError(
            f"agents.{first.agent_id}.tensor_parallel_size is {workers}, but a node has {cluster.gpus_per_node} GPUs; "
            "lower it to that or less"
        )
    return first.num_engines, workers


def _check_shared(trained: Sequence[AgentNeeds], replicas: int, workers: int) -> None:
    if workers > 1:
        raise ConfigError(
            f"runtime.colocate=true with agents.{trained[0].agent_id}.tensor_parallel_size={workers} is not available: "
            "one engine would need shares of several GPUs; set tensor_parallel_size=1 or runtime.colocate=false"
        )
    for agent in trained:
        if agent.devices != replicas * workers:
            raise ConfigError(
                f"runtime.colocate=true needs as many ranks as engine workers, but agents.{agent.agent_id}.devices is "
                f"{agent.devices} and num_engines x tensor_parallel_size is {replicas * workers}: set them alike"
            )


def _check_enough(needed: int, cluster: Cluster, colocate: bool) -> None:
    if cluster.gpus and needed > cluster.gpus:
        sharing = "" if colocate else ", or set runtime.colocate=true"
        raise ConfigError(
            f"the run needs {needed} GPUs and there are {cluster.gpus} ({cluster.nodes} x {cluster.gpus_per_node}): "
            f"lower agents.*.devices, num_engines or tensor_parallel_size{sharing}"
        )
