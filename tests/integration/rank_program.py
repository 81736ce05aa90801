"""One rank of an agent's training, as a program: `python -m tests.integration.rank_program RANK SIZE PORT FOLDER`.

FOLDER/cases.json says what to train, one run after the other; rank 0 writes FOLDER/<case>.json, with the reports
of the steps or the error, and the last weights to FOLDER/<case>.safetensors.
Size 0 trains in one process on a single device, which is what all others have to agree with.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from safetensors.torch import save_file
from torch import Tensor

from lightning_mappa.agent_trainer import agent_parts, train_agent
from lightning_mappa.agents import agent_facts, load_agent
from lightning_mappa.callbacks.kl_penalty import KLPenalty
from lightning_mappa.callbacks.weight_sync import WeightSync
from lightning_mappa.datamodules.rollout import RolloutDataModule
from lightning_mappa.errors import MappaError
from lightning_mappa.models.load import add_adapter
from lightning_mappa.run_folder import RunFolder
from lightning_mappa.runtime.cluster_environment import ExternalRanks
from lightning_mappa.runtime.rank_link import RankLink
from lightning_mappa.strategies.build import build_strategy, check_checkpoint
from lightning_mappa.strategies.zero import TIMEOUT_MARGIN_S
from lightning_mappa.testing import tiny_llama
from lightning_mappa.types import Experience
from tests.integration.conftest import small_config
from tests.unit.in_process import VOCAB, InProcessRun, make_agent, make_trainer, some_score

LORA: dict[str, Any] = {"r": 4, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear", "seed": 0}
DEADLINE_S = 30.0
"""Of waits for the run; the collectives of ranks wait longer by `TIMEOUT_MARGIN_S`."""


def alter(case: dict[str, Any], step: int, actions: list[Experience]) -> list[Experience]:
    """`counts`: actions per step, each with 1 … 5 tokens and turns 0 … 3."""
    counts = case.get("counts", [6, 6, 6, 6])
    return [
        dataclasses.replace(
            e,
            turn=number % 4,
            response_ids=e.response_ids[: 1 + number % 5],
            rollout_log_probs=e.rollout_log_probs[: 1 + number % 5],
        )
        for number, e in enumerate(actions[: counts[step]])
    ]


class Poison(Callback):
    """Makes the gradient of one step of the last rank not a number."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._now = False

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        last = trainer.global_rank == trainer.world_size - 1

        def hook(grad: Tensor) -> Tensor:
            return grad * float("nan") if self._now and last else grad

        next(p for p in pl_module.parameters() if p.requires_grad).register_hook(hook)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._now = batch.step == self._step


class Memory(Callback):
    """What a rank holds of the model at most, in numbers, while it is read as a whole, and for the reference."""

    def __init__(self, penalty: KLPenalty) -> None:
        self._penalty = penalty
        self.noted: dict[str, int] = {}

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        held = [sum(p.numel() for p in pl_module.parameters()) for _ in pl_module.full_tensors()]
        self.noted = {
            "model": sum(getattr(p, "ds_numel", p.numel()) for p in pl_module.parameters()),
            "largest": max(getattr(p, "ds_numel", p.numel()) for p in pl_module.parameters()),
            "read": max(held),
            "reference": sum(t.numel() for t in self._penalty._reference.values()),
        }


def play(case: dict[str, Any], rank: int, size: int, port: int, folder: Path) -> tuple[InProcessRun, dict[str, int]]:
    model: Any = tiny_llama(VOCAB, 0)
    if case.get("untied"):
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0).clone())
    if case.get("lora"):
        model = add_adapter(model, **LORA)
    first_step, max_steps = case.get("first_step", 0), case.get("max_steps", 3)
    run = InProcessRun(
        model,
        max_steps=max_steps,
        first_step=first_step,
        n_actions=max(case.get("counts", [6])),
        score=some_score,
        alter=lambda step, actions: alter(case, step, actions),
        checkpoints={int(step): folder / path for step, path in case.get("checkpoints", {}).items()},
    )
    link, ranks = linked(run, rank, size, port)
    options = {"lr": 1e-2, "max_steps": max_steps, **case.get("agent", {})}
    module = make_agent(model, **options)
    name = case.get("strategy", "single_device") if size else "single_device"
    resume = folder / case["resume"] if case.get("resume") else None
    if resume is not None:
        check_checkpoint(resume, "solver", name, max(size, 1))
    strategy = build_strategy(
        name, accelerator="cpu", ranks=ranks, deadline_s=DEADLINE_S, grad_clip=options.get("grad_clip", 1.0)
    )
    penalty = KLPenalty(kl_coef=0.1)
    memory = Memory(penalty)
    callbacks: list[Callback] = [WeightSync(), penalty, memory]
    if "poison" in case:
        callbacks.append(Poison(case["poison"]))
    trainer = make_trainer(
        folder,
        callbacks=callbacks,
        strategy=strategy,
        num_nodes=max(size, 1),
        precision=case.get("precision", "32-true"),
    )
    trainer.fit(module, datamodule=RolloutDataModule(link), ckpt_path=resume, weights_only=True)
    return run, memory.noted


def play_config(case: dict[str, Any], rank: int, size: int, port: int, folder: Path) -> InProcessRun:
    """As a run does it: from a config, with its callbacks and loggers, in a run folder."""
    cfg = small_config(
        folder / "run",
        "runtime=ray",
        "runtime.deadline_s=30",
        f"agents.solver.strategy={case['strategy'] if size else 'single_device'}",
        f"agents.solver.devices={max(size, 1)}",
        *case["config"],
    )
    agent = load_agent(cfg, agent_facts(cfg)["solver"])
    run = InProcessRun(agent.model, max_steps=cfg.trainer.max_steps, score=some_score, success={0: 0.1, 1: 0.3, 2: 0.2})
    parts = agent_parts(cfg, agent)
    train_agent(cfg, RunFolder(folder / "run"), parts, None, *linked(run, rank, size, port))
    return run


def linked(run: InProcessRun, rank: int, size: int, port: int) -> tuple[Any, ExternalRanks | None]:
    """The link of this rank, and what it knows of the others; the run's own and None for one process."""
    if size == 0:
        return run, None
    link = RankLink(
        run if rank == 0 else None,
        rank=rank,
        agent_id=run.agent_id,
        first_step=run.first_step,
        max_steps=run.max_steps,
        timeout_s=DEADLINE_S + TIMEOUT_MARGIN_S,
    )
    return link, ExternalRanks(rank, size, "127.0.0.1", port)


def main(rank: int, size: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    for case in json.loads((folder / "cases.json").read_text()):
        start = time.monotonic()
        try:
            memory: dict[str, int] = {}
            if "config" in case:
                run = play_config(case, rank, size, port, folder)
            else:
                run, memory = play(case, rank, size, port, folder)
            result: dict[str, Any] = {"reports": run.reports, "memory": memory}
        except MappaError as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        result["seconds"] = time.monotonic() - start
        if rank == 0:
            if "error" not in result:
                last = run.pushed[max(run.pushed)]
                save_file({n: t.float() for n, t in last.items()}, folder / f"{case['name']}.safetensors")
            (folder / f"{case['name']}.json").write_text(json.dumps(result))
        else:
            (folder / f"{case['name']}.rank{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
