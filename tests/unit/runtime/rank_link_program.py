"""One of two ranks that share a link: `python -m tests.unit.runtime.rank_link_program RANK PORT FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_mappa.errors import InfrastructureError, RunEnded
from lightning_mappa.rollout.fingerprint import Fingerprint
from lightning_mappa.runtime.rank_link import RankLink
from lightning_mappa.runtime.weight_sender import WholeWeights
from lightning_mappa.strategies.zero import WholeTensors
from lightning_mappa.testing import tiny_llama
from tests.unit.in_process import VOCAB, InProcessRun

PRINT = Fingerprint(prompt_ids=(1,), token_ids=(2,), log_probs=(-1.0,))


class Breaking(InProcessRun):
    """Takes one tensor of version 2 and fails; meets with an error of no known class at version 3."""

    def push_weights(self, version: int, tensors: Any, fingerprint: Fingerprint) -> None:
        if version == 2:
            next(iter(tensors))
            raise InfrastructureError("the engine is gone")
        if version == 3:
            raise ZeroDivisionError("by nothing")
        super().push_weights(version, tensors, fingerprint)

    def weights_sent(self, version: int, n_bytes: int, fingerprint: Fingerprint) -> None:
        super().weights_sent(version, n_bytes, fingerprint)
        if version == 5:
            raise InfrastructureError("the engine serves others")


class Summing:
    """Every rank takes part, as in a gather; rank 0 alone is told of engines."""

    def __init__(self, heard: list[Any]) -> None:
        self._heard = heard

    def send(self, tensors: WholeWeights, engines: Any) -> int:
        total = torch.tensor(float(sum(tensor.sum() for _, tensor in tensors)))
        dist.all_reduce(total)
        self._heard.append((list(engines), total.item()))
        return 7


def outcome(call: Any) -> str:
    try:
        return repr(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main(rank: int, port: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    run = Breaking(tiny_llama(VOCAB, 0), last_step=0, checkpoints={1: folder / "solver.ckpt"})
    read: list[int] = []

    def tensors(version: int) -> Any:
        """Each comes out of a sum over both ranks, as gathered shards do."""
        for name, tensor in tiny_llama(VOCAB, version).named_parameters():
            shared = tensor.detach().clone()
            dist.all_reduce(shared)
            read.append(version)
            yield name, shared / 2

    link = RankLink(run if rank == 0 else None, rank=rank, agent_id="solver", first_step=0, max_steps=3, timeout_s=60.0)
    said = [
        outcome(lambda: link.checkpoint_path(0)),
        outcome(lambda: link.experience(0)),
        outcome(lambda: link.exchange(0, {}, 0.1)),
        outcome(lambda: link.push_weights(1, tensors(1), PRINT)),
        outcome(lambda: link.push_weights(2, tensors(2), PRINT)),
        outcome(lambda: link.push_weights(3, tensors(3), PRINT)),
        outcome(lambda: link.evaluation(1)),
        outcome(lambda: link.checkpoint_path(1)),
        outcome(lambda: link.checkpoint_saved(1)),
        outcome(lambda: link.experience(1)),
    ]
    direct: list[Any] = []
    straight = RankLink(
        run if rank == 0 else None,
        rank=rank,
        agent_id="solver",
        first_step=0,
        max_steps=3,
        timeout_s=60.0,
        sender=Summing(direct),
    )
    straight.push_weights(4, WholeTensors(dict(tiny_llama(VOCAB, 4).named_parameters())), PRINT)
    said.append(outcome(lambda: straight.push_weights(5, WholeTensors({}), PRINT)))
    link.leave(RunEnded("over"))
    pushed = run.pushed.get(1, {})
    right = all(torch.equal(pushed[n], p) for n, p in tiny_llama(VOCAB, 1).named_parameters()) if pushed else None
    note = {"said": said, "read": {v: read.count(v) for v in (1, 2, 3)}, "left": len(run.left), "right": right}
    note |= {"direct": direct, "sent": [call for call in run.calls if call[0].startswith("weights_sent")]}
    (folder / f"{rank}.json").write_text(json.dumps(note))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
