"""Weights out of the sharded checkpoints that two real ranks have saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_mappa.models.load import add_adapter, load_trained_tensors, trained_tensors
from lightning_mappa.saved_weights import read_tensors
from lightning_mappa.testing import tiny_llama
from tests.integration.rank_program import LORA
from tests.integration.test_zero import LIMIT_S, RANKS, train
from tests.packages import needs
from tests.unit.in_process import VOCAB

pytestmark = [pytest.mark.slow, needs("deepspeed"), pytest.mark.timeout(LIMIT_S + 60)]

AGENT = {"mini_batch_size": 4, "micro_batch_size": 1, "warmup_ratio": 0.0, "min_lr_ratio": 1.0}
"""The same learning rate whatever the number of steps."""


@pytest.mark.parametrize(("strategy", "lora"), [("zero2", False), ("zero3", False), ("zero3", True)])
def test_a_sharded_checkpoint_holds_the_weights_of_its_step_to_the_bit(strategy: str, lora: bool, tmp_path: Path):
    """A run that goes on saves after step 1 what a run of one step ends with."""
    cases: dict[str, dict[str, Any]] = {
        "ends": {"lora": lora, "max_steps": 1, "agent": AGENT},
        "goes_on": {"lora": lora, "max_steps": 2, "checkpoints": {"1": "solver.ckpt"}, "agent": AGENT},
    }
    ended = train(tmp_path / "runs", cases, RANKS, strategy)["ends"].weights
    model: Any = tiny_llama(VOCAB, 0)
    if lora:
        model = add_adapter(model, **LORA)
    before = {name: tensor.clone() for name, tensor in trained_tensors(model).items()}
    part = tmp_path / "runs" / "solver.ckpt"
    assert part.is_dir()
    load_trained_tensors(model, read_tensors(part, model))
    after = trained_tensors(model)
    assert set(after) == set(ended)
    assert all(torch.equal(after[name], ended[name]) for name in after)
    assert any(not torch.equal(after[name], before[name]) for name in after)
