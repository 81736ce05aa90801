"""The strategy that a config names, and the checkpoints that it can go on from."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from lightning.pytorch.strategies import Strategy

from lightning_mappa.algorithm.choices import check_choice
from lightning_mappa.errors import ConfigError
from lightning_mappa.runtime.cluster_environment import ExternalRanks
from lightning_mappa.strategies.zero import STAGES, ZeroStrategy

SINGLE_DEVICE = "single_device"
STRATEGIES = (SINGLE_DEVICE, *STAGES)


def build_strategy(
    name: str, *, accelerator: str, ranks: ExternalRanks | None, deadline_s: float, grad_clip: float
) -> Strategy | str:
    """What `Trainer(strategy=…)` takes.

    Args:
        name: one of STRATEGIES.
        accelerator: `cpu`, or `cuda` for everything else.
        ranks: of this process; only `single_device` does without.
        deadline_s: longest wait of the run.
        grad_clip: largest gradient norm; 0 clips nothing. `single_device` leaves clipping to the module.

    Raises:
        ConfigError: an unknown name, ranks that the strategy cannot use, or DeepSpeed is not installed.
    """
    check_choice("strategy", name, STRATEGIES)
    if name == SINGLE_DEVICE:
        if ranks is not None and ranks.world_size() > 1:
            raise ConfigError(
                f"strategy={name} trains on one rank, devices={ranks.world_size()}; "
                f"allowed for more: {', '.join(STAGES)}"
            )
        return "auto"
    if ranks is None:
        raise ConfigError(
            f"strategy={name} needs ranks of its own: runtime=ray starts them; allowed here: {SINGLE_DEVICE}"
        )
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(f"strategy={name} needs DeepSpeed: pip install lightning-mappa[deepspeed]")
    return ZeroStrategy(
        name, accelerator=accelerator, cluster_environment=ranks, deadline_s=deadline_s, grad_clip=grad_clip
    )


def check_checkpoint(part: Path, agent_id: str, name: str, world_size: int) -> None:
    """Raises `ConfigError` unless this strategy on so many ranks can go on from an agent's part of a checkpoint.

    A single device leaves one file behind, ZeRO a folder with a shard of the optimizer's state per rank.
    """
    key = f"agents.{agent_id}"
    if part.is_dir() != (name in STAGES):
        saved = "a zero strategy" if part.is_dir() else f"strategy={SINGLE_DEVICE}"
        raise ConfigError(f"{key}.strategy is {name}, its checkpoint {part} was saved by {saved}; resume with that one")
    if not part.is_dir():
        return
    shards = sorted(part.glob("*/*zero_pp_rank_*_optim_states.pt"))
    if len(shards) != world_size:
        raise ConfigError(
            f"{key}.devices is {world_size}, its checkpoint {part} was saved on {len(shards)} ranks; "
            f"resume with {key}.devices={len(shards)}"
        )
    has_stage_3 = any(part.glob("*/zero_pp_rank_*_model_states.pt"))
    if has_stage_3 != (STAGES[name] == 3):
        saved = "zero3" if has_stage_3 else "zero2"
        raise ConfigError(f"{key}.strategy is {name}, its checkpoint {part} was saved by {saved}; resume with that one")
