"""One rank of one agent's training, as an actor."""

from __future__ import annotations

import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from lightning_mappa.memory import peak_rss_gib
from lightning_mappa.run_folder import RunFolder
from lightning_mappa.runtime.cluster_environment import ExternalRanks
from lightning_mappa.runtime.rank_link import RankLink
from lightning_mappa.runtime.remote_link import Answer, Call, Ended, RemoteLink
from lightning_mappa.runtime.weight_sender import WeightSender


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Which rank of which agent an actor is."""

    agent_id: str
    rank: int
    world_size: int
    main_address: str
    main_port: int


class RankWorker:
    """Holds one agent's module, or this rank's share of it, and runs its Trainer in a thread.

    Its methods run in other threads, so that it answers while it trains.

    Args:
        config: of the run, as YAML.
        search_path: folders of the driver in which the user's own classes may be.
    """

    def __init__(self, config: str, search_path: tuple[str, ...]) -> None:
        sys.path.extend(path for path in search_path if path not in sys.path)
        cfg = OmegaConf.create(config)
        assert isinstance(cfg, DictConfig)
        self._cfg = cfg
        self._parts: Any = None
        self._place: RankPlace | None = None
        self._link: RemoteLink | None = None
        self._sender: WeightSender | None = None

    def main_address(self) -> tuple[str, int]:
        """This machine's address and a port that is free on it."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def prepare(self, place: RankPlace) -> None:
        """Loads the model and builds what the Trainer is given. Raises `ConfigError` for what they refuse."""
        from lightning_mappa.agent_trainer import agent_parts
        from lightning_mappa.agents import agent_facts, load_agent
        from lightning_mappa.system import quiet_libraries, seed_everything

        quiet_libraries()
        seed_everything(self._cfg)
        self._place = place
        self._parts = agent_parts(self._cfg, load_agent(self._cfg, agent_facts(self._cfg)[place.agent_id]))

    def train(self, folder: Path, checkpoint: Path | None, *, first_step: int, max_steps: int) -> None:
        """Starts the Trainer and returns."""
        assert self._place is not None
        from lightning_mappa.system import longest_wait_s

        # Longer than any wait of the run itself, which says better what it was for.
        timeout_s = 2 * longest_wait_s(self._cfg)
        self._sender = _sender(self._cfg, self._place)
        self._link = RemoteLink(
            self._place.agent_id,
            first_step=first_step,
            max_steps=max_steps,
            timeout_s=timeout_s,
            sender=self._sender,
        )
        arguments = (self._link, self._place, RunFolder(folder), checkpoint)
        threading.Thread(target=self._train, args=arguments, name="trainer", daemon=True).start()

    def next_event(self, timeout_s: float) -> Call | Ended | None:
        assert self._link is not None
        return self._link.next_event(timeout_s)

    def answer(self, answer: Answer) -> None:
        assert self._link is not None
        self._link.answer(answer)

    def ping(self) -> float | None:
        """The most memory that the process has held so far, in GiB."""
        return peak_rss_gib()

    def _train(self, link: RemoteLink, place: RankPlace, folder: RunFolder, checkpoint: Path | None) -> None:
        from lightning_mappa.agent_trainer import train_agent

        error: BaseException | None = None
        try:
            if self._cfg.agents[place.agent_id].strategy == "single_device":
                train_agent(self._cfg, folder, self._parts, checkpoint, link)
            else:
                train_agent(
                    self._cfg, folder, self._parts, checkpoint, _shared(link, place, self._sender), _ranks(place)
                )
        except BaseException as caught:
            error = caught
        link.end(error)


def _shared(link: RemoteLink, place: RankPlace, sender: WeightSender | None) -> RankLink:
    return RankLink(
        link if place.rank == 0 else None,
        rank=place.rank,
        agent_id=place.agent_id,
        first_step=link.first_step,
        max_steps=link.max_steps,
        timeout_s=2 * link.timeout_s,
        sender=sender,
    )


def _sender(cfg: DictConfig, place: RankPlace) -> WeightSender | None:
    """None where weights go through the object store, as adapters always do."""
    agent, transport = cfg.agents[place.agent_id], cfg.engine.weight_transport
    if cfg.engine.name != "vllm" or transport == "object_store" or agent.model.lora is not None:
        return None
    from lightning_mappa.runtime.cuda_transport import CudaSender

    return CudaSender(
        transport,
        getattr(torch, agent.model.dtype),
        rank=place.rank,
        ranks_per_engine=agent.tensor_parallel_size,
        timeout_s=cfg.runtime.deadline_s,
    )


def _ranks(place: RankPlace) -> ExternalRanks:
    return ExternalRanks(place.rank, place.world_size, place.main_address, place.main_port)
