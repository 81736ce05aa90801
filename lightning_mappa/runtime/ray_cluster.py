"""The Ray cluster that a run uses: joined or started, with one placement group for all of its actors."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lightning_mappa.errors import ConfigError, InfrastructureError
from lightning_mappa.runtime.placement import Bundle, Cluster, Placement

READY_S = 120.0
CONNECT_S = 10.0
GIB = 2**30


class RayCluster:
    """Joins the cluster at `address`, or starts one on this machine that ends with this process.

    Only the installed package runs on other nodes; nothing of the working folder is sent there.

    Args:
        address: `auto`, `ray://…` or `host:port`; None starts one.
        object_store_gb: of the one that is started; None leaves it to Ray, at most 2 GiB.
        accelerator: `cpu` asks for no GPUs.
    """

    def __init__(self, address: str | None, *, object_store_gb: float | None, accelerator: str) -> None:
        self._owns = not ray.is_initialized()
        self._group: PlacementGroup | None = None
        self._bundle_of: dict[int, int] = {}
        if self._owns:
            _initialize(address, object_store_gb, accelerator)
        self.cluster = _hardware(accelerator)

    def reserve(self, placement: Placement) -> None:
        """Takes what `placement` asks for, all at once. Raises `InfrastructureError` when it is not to be had."""
        bundles, self._bundle_of = bundles_of(placement)
        self._group = placement_group(bundles, strategy=placement.strategy)
        if not self._group.wait(READY_S):
            raise InfrastructureError(
                f"the cluster has not given the run its {len(bundles)} places within {READY_S:g} s: it asks for "
                f"{_total(bundles)} and there are {ray.available_resources()} free"
            )

    def options(self, bundles: tuple[Bundle, ...], env: Mapping[str, str]) -> dict[str, Any]:
        """Of an actor that takes `bundles`: its place, its share of it, and the environment it starts with."""
        assert self._group is not None
        gpus = sum(bundle.gpus for bundle in bundles)
        return {
            "num_cpus": sum(bundle.cpus for bundle in bundles),
            "num_gpus": round(gpus) if gpus > 1 else gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=self._bundle_of[bundles[0].slot]
            ),
            "runtime_env": {"env_vars": dict(env)},
            "max_restarts": 0,
        }

    def close(self) -> None:
        """Gives back the places, and ends the cluster where it was started here."""
        if not ray.is_initialized():
            return
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        if self._owns:
            ray.shutdown()


def bundles_of(placement: Placement) -> tuple[list[dict[str, float]], dict[int, int]]:
    """Ray's bundles, and the bundle of each slot: the workers of one engine are in one, as one actor has them all."""
    bundle_of: dict[int, int] = {}
    for engine in placement.engines:
        slots = {bundle.slot for bundle in engine.bundles}
        bundle_of |= {slot: min(slots) for slot in slots}
    numbers: dict[int, int] = {}
    bundles: list[dict[str, float]] = []
    for slot, resources in enumerate(placement.slots):
        first = bundle_of.get(slot, slot)
        if first == slot:
            numbers[slot] = len(bundles)
            bundles.append(dict(resources))
        else:
            numbers[slot] = numbers[first]
            whole = bundles[numbers[first]]
            bundles[numbers[first]] = {name: whole[name] + resources[name] for name in whole}
    return bundles, numbers


def search_path() -> tuple[str, ...]:
    """Where an actor may find the user's own classes: the folder that the command was started in."""
    return (os.getcwd(), *(path for path in sys.path[:1] if path))


def _hardware(accelerator: str) -> Cluster:
    """Nodes without a GPU, such as a head node, take no part in a run on GPUs."""
    if accelerator == "cpu":
        return Cluster(nodes=sum(node["Alive"] for node in ray.nodes()))
    gpus = [int(count) for node in ray.nodes() if node["Alive"] and (count := node["Resources"].get("GPU", 0)) >= 1]
    if not gpus:
        raise ConfigError(f"trainer.accelerator={accelerator}, but no node of the Ray cluster has a GPU; allowed: cpu")
    return Cluster(nodes=len(gpus), gpus_per_node=min(gpus))


def _initialize(address: str | None, object_store_gb: float | None, accelerator: str) -> None:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray would hide GPUs from parts without a share
    options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        options["object_store_memory"] = int((object_store_gb or 2.0) * GIB)
        options["num_cpus"] = max(4, os.cpu_count() or 1)
        if accelerator == "cpu":
            options["num_gpus"] = 0
    elif object_store_gb is not None:
        raise ConfigError(
            f"runtime.object_store_gb is for a cluster that is started here, but runtime.address={address} joins one"
        )
    try:
        _knock(address)
        ray.init(address=address, **options)
    except (OSError, ValueError, RuntimeError) as error:
        where = f"runtime.address={address}" if address is not None else "a new one on this machine"
        raise InfrastructureError(f"no Ray cluster ({where}): {str(error).splitlines()[0]}") from error


def _knock(address: str | None) -> None:
    """Ray waits a minute for a host:port where nobody listens, and then ends the process."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdigit() and "/" not in host:
        with socket.create_connection((host, int(port)), timeout=CONNECT_S):
            pass


def _total(bundles: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(sum(one.get(name, 0.0) for one in bundles), 2) for name in ("CPU", "GPU")}
