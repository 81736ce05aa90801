"""`coach.min_audit`: no run is trained by a coach that does not find out who was at fault."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_mappa.audit.audit import CASES, blame, require_audit
from lightning_mappa.build import READ_BY_THE_RUN, build, locate
from lightning_mappa.coaches.base import Coach, bind_accounts, check_coach, close_coach
from lightning_mappa.errors import ConfigError, DataError
from lightning_mappa.files import read_json, write_json
from lightning_mappa.models.smollm2 import cache_root

MIN_CASES = 28
"""Two of every template."""
REPORT = "blame.json"


def require_floor(cfg: DictConfig) -> None:
    """Audits the run's coach where `coach.min_audit` is set, or takes what an earlier run has found of it.

    The audit is of a coach of its own, so that the run's learns nothing from it. Its report, and the log of its
    calls, lie in the cache under a hash of the coach's config and code: an interrupted one is gone on with, and one
    that has ended is not paid for again.

    Raises:
        CoachError: its blame accuracy is below the floor; or its budget does not last for the audit.
        ConfigError: a floor or a number of cases that cannot be.
    """
    floor, n_cases = cfg.coach.get("min_audit"), cfg.coach.get("audit_cases", 2 * MIN_CASES)
    if floor is None:
        return
    if isinstance(floor, bool) or not isinstance(floor, int | float) or not 0 <= floor <= 1:
        raise ConfigError(f"coach.min_audit is {floor}; allowed: 0 to 1, or null for no audit")
    if isinstance(n_cases, bool) or not isinstance(n_cases, int) or n_cases < MIN_CASES:
        raise ConfigError(f"coach.audit_cases is {n_cases}; allowed: {MIN_CASES} or more")
    folder = cache_root() / "audits" / coach_digest(cfg.coach, seed=cfg.seed, n_cases=n_cases, cases=cfg.cases)
    report = _known(folder / REPORT) or _audited(cfg, folder, n_cases)
    figure = report["figures"]["blame_accuracy"]
    command = f"mappa audit cases={cfg.cases} n_cases={n_cases} seed={cfg.seed}, with the same coach=… and coach.KEY=…"
    require_audit(report, floor, f" (coach.min_audit); see {folder / REPORT}, or run: {command}")
    print(f"coach {report['coach']} blames the right agent in {figure['value']:.3f} of {figure['n']} audit cases")


def coach_digest(node: DictConfig, *, seed: int, n_cases: int, cases: str = "mathchat") -> str:
    """Of the coach's config and the source files of the classes in it; the keys for the run are not part of it."""
    plain: Any = OmegaConf.to_container(node, resolve=True)
    coach = {name: value for name, value in plain.items() if name not in READ_BY_THE_RUN["coach"]}
    sources = {target: _source(target) for target in sorted(set(_targets(coach)))}
    content = json.dumps([coach, sources, seed, n_cases, cases], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _known(path: Path) -> dict[str, Any] | None:
    try:
        return read_json(path)
    except DataError:
        return None


def _audited(cfg: DictConfig, folder: Path, n_cases: int) -> dict[str, Any]:
    coach: Coach = build(cfg.coach, "coach")

    async def ask() -> dict[str, Any]:
        await check_coach(coach)
        folder.mkdir(parents=True, exist_ok=True)
        bind_accounts(coach, folder)
        return await blame(coach, CASES[cfg.cases](cfg.seed, n_cases), seed=cfg.seed)

    try:
        report = asyncio.run(ask())
    finally:
        close_coach(coach)
    write_json(folder / REPORT, report)
    return report


def _targets(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield str(node["_target_"])
        for inner in node.values():
            yield from _targets(inner)
    elif isinstance(node, list):
        for inner in node:
            yield from _targets(inner)


def _source(target: str) -> str:
    """Of the whole file, because a class has helpers beside it; what has none is known by its name."""
    try:
        file = inspect.getsourcefile(locate(target, "coach"))
        return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except (TypeError, OSError):
        return ""
