"""`runtime=ray`: engines and every rank of every Trainer as actors, coordinator and board in the driver."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf

from lightning_mappa.agents import agent_facts
from lightning_mappa.errors import InfrastructureError, MappaError
from lightning_mappa.memory import peak_rss_gib
from lightning_mappa.run_folder import RunFolder
from lightning_mappa.runtime.board import Board
from lightning_mappa.runtime.engines import RemoteEngine, start_engine
from lightning_mappa.runtime.monitor import Monitor
from lightning_mappa.runtime.placement import agent_needs, place
from lightning_mappa.runtime.rank_worker import RankPlace, RankWorker
from lightning_mappa.runtime.ray_cluster import RayCluster, search_path
from lightning_mappa.runtime.relay import Rank, first_line, run_ranks
from lightning_mappa.system import longest_wait_s, torch_threads

CONCURRENCY = 4
"""Of a rank's actor: its own calls, answers, and signs of life."""


class RayPlace:
    """All that holds weights is in actors; see `runtime.base.Place`."""

    stages_weights = True
    """So that all agents' engines are updated at once."""

    def __init__(self, cfg: DictConfig) -> None:
        self._cfg = cfg
        self._config = OmegaConf.to_yaml(cfg, resolve=True)
        self._ranks: list[Rank] = []
        self._peak_rss: dict[str, float | None] = {}
        self._closed = False
        self.facts = agent_facts(cfg)
        self.turns = Monitor(longest_wait_s(cfg))
        self._cluster = RayCluster(
            cfg.runtime.address, object_store_gb=cfg.runtime.object_store_gb, accelerator=cfg.trainer.accelerator
        )
        try:
            self._placement = place(
                agent_needs(cfg),
                self._cluster.cluster,
                colocate=cfg.runtime.colocate,
                one_engine=cfg.engine.name == "transformers",
            )
            self._cluster.reserve(self._placement)
            self.engine: RemoteEngine = start_engine(cfg, self.facts, self._placement, self._cluster)
        except BaseException:
            self._cluster.close()
            raise

    def prepare(self) -> None:
        worker = ray.remote(RankWorker)
        # glibc would keep a heap per thread, each as large as its last peak; see `local.share_one_heap`.
        env = {
            "OMP_NUM_THREADS": str(torch_threads(self._cfg)),
            "GOMP_SPINCOUNT": "1000",
            "MALLOC_ARENA_MAX": "1",
        }
        if self._cfg.trainer.accelerator == "cpu":
            env["DS_ACCELERATOR"] = "cpu"
        for agent in self._placement.agents:
            for number, bundle in enumerate(agent.ranks):
                options = {**self._cluster.options((bundle,), env), "max_concurrency": CONCURRENCY}
                actor = worker.options(**options).remote(self._config, search_path())
                self._ranks.append(Rank(agent_id=agent.agent_id, number=number, actor=actor))
        ready = [
            rank.actor.prepare.remote(at)
            for agent in self._placement.agents
            for rank, at in self._meeting(agent.agent_id)
        ]
        self._wait(ready, "the ranks to load")

    def train(self, board: Board, folder: RunFolder, checkpoint: Path | None, drive: Callable[[], None]) -> None:
        path = folder.path.absolute()
        at = None if checkpoint is None else checkpoint.absolute()
        steps = {"first_step": board.first_step, "max_steps": board.max_steps}
        self._wait([rank.actor.train.remote(path, at, **steps) for rank in self._ranks], "the ranks to start")
        run_ranks(board, self._ranks, drive, heartbeat_s=self._cfg.runtime.heartbeat_s, pulse=self._peak_rss)

    def usage(self) -> dict[str, Any]:
        return {
            "peak_rss_gib": {"driver": peak_rss_gib(), **self.engine.peak_rss_gib(), **self._peak_rss},
            "weight_sync_bytes": dict(self.engine.sync_bytes),
        }

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            for rank in self._ranks:
                ray.kill(rank.actor)
            self._ranks = []
            self.engine.close()
        finally:
            self._cluster.close()

    def _meeting(self, agent_id: str) -> list[tuple[Rank, RankPlace]]:
        """An agent's ranks, and where each finds the others: at a port of rank 0's machine."""
        ranks = [rank for rank in self._ranks if rank.agent_id == agent_id]
        ((address, port),) = self._wait([ranks[0].actor.main_address.remote()], "the address of rank 0")
        return [
            (
                rank,
                RankPlace(
                    agent_id=agent_id,
                    rank=rank.number,
                    world_size=len(ranks),
                    main_address=address,
                    main_port=port,
                ),
            )
            for rank in ranks
        ]

    def _wait(self, refs: list[Any], what: str) -> list[Any]:
        try:
            return ray.get(refs, timeout=self._cfg.runtime.deadline_s)
        except ray.exceptions.GetTimeoutError as error:
            raise InfrastructureError(f"waited more than {self._cfg.runtime.deadline_s:g} s for {what}") from error
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, MappaError):
                raise error.cause from None
            raise
        except ray.exceptions.RayError as error:
            raise InfrastructureError(f"lost an actor while waiting for {what}: {first_line(error)}") from error
