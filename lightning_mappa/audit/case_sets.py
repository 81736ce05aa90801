"""Which planted faults a coach is audited with: those of the team that it is to judge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from omegaconf import DictConfig, OmegaConf

from lightning_mappa.audit.cases import AuditCase
from lightning_mappa.audit.planted import make_cases
from lightning_mappa.audit.table_planted import STAGES, make_table_cases
from lightning_mappa.build import locate
from lightning_mappa.errors import ConfigError
from lightning_mappa.workflows.file_relay import FileRelay, read_stages


class CaseMaker(Protocol):
    def __call__(self, seed: int, n_cases: int, *, held_out: bool = False) -> list[AuditCase]: ...


CASES: Mapping[str, CaseMaker] = {"mathchat": make_cases, "dsbench": make_table_cases}
"""Name of the workflow whose team has the faults → what makes them."""


def case_set(cfg: DictConfig) -> str:
    """A key of `CASES`: what `cases` says, with `auto` what fits the workflow.

    Raises `ConfigError` where there are none: for a class of the user's own, and for files that other teams hand on.
    """
    if cfg.cases != "auto":
        return str(cfg.cases)
    target = locate(str(cfg.workflow["_target_"]), "workflow")
    if target is FileRelay:
        stages: Any = OmegaConf.to_container(cfg.workflow, resolve=True)
        if read_stages(stages["stages"], "workflow.stages") == read_stages(STAGES, "STAGES"):
            return "dsbench"
    elif target.__module__.partition(".")[0] == __name__.partition(".")[0]:
        return "mathchat"
    raise ConfigError(
        f"there are no audit cases for the team of {cfg.workflow['_target_']} as it is configured; give the set that "
        f"comes nearest, cases={' or cases='.join(CASES)}, or leave the coach unaudited (coach.min_audit=null)"
    )
