"""`coach.min_audit`: no run is trained by a coach that does not find out who was at fault."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from omegaconf import DictConfig

from lightning_mappa.audit.audit import ASKED_ONCE, audit_coach, require_audit, require_verdicts
from lightning_mappa.audit.case_sets import CASES, case_set
from lightning_mappa.audit.cases import AuditCase
from lightning_mappa.audit.digest import audit_digest
from lightning_mappa.audit.watched import max_missing_rate, not_ended
from lightning_mappa.build import build
from lightning_mappa.coaches.base import (
    Coach,
    SharesBudget,
    bind_accounts,
    check_coach,
    close_coach,
    with_parts,
)
from lightning_mappa.coaches.budget import Budget
from lightning_mappa.coaches.watch import missing_watch
from lightning_mappa.errors import CoachError, ConfigError, DataError, InfrastructureError
from lightning_mappa.files import read_json, write_json
from lightning_mappa.models.smollm2 import cache_root

MIN_CASES = 28
"""Two of every template."""
REPORT = "blame.json"
LOCK = ".lock"


def require_floor(cfg: DictConfig) -> None:
    """Audits the run's coach where `coach.min_audit` is set, or takes what an earlier run has found of it.

    The audit is of a coach of its own, so that the run's learns nothing from it. Its report, and the log of its
    calls, lie in the cache under `audit_digest`: an interrupted one is gone on with, one that has ended is not paid
    for again, and of several runs that want the same one the first makes it and the others wait. Its calls are in
    the books of the audit and not in the run's: `coach.audit_budget_usd` and `coach.audit_budget_calls` cap them.

    Raises:
        CoachError: its blame accuracy is below the floor, it follows injections or pays for padding. Or the audit's
            caps, or the coach's own, do not last for the audit, or too many verdicts are missing: nothing is
            remembered of the coach then, and the next run goes on with the audit.
        ConfigError: a floor, a cap or a number of cases that cannot be; no cases for the workflow.
        InfrastructureError: another run's audit of the same coach took longer than `runtime.deadline_s`.
    """
    floor, n_cases = cfg.coach.get("min_audit"), cfg.coach.get("audit_cases", 2 * MIN_CASES)
    if floor is None:
        return
    if isinstance(floor, bool) or not isinstance(floor, int | float) or not 0 <= floor <= 1:
        raise ConfigError(f"coach.min_audit is {floor}; allowed: 0 to 1, or null for no audit")
    if isinstance(n_cases, bool) or not isinstance(n_cases, int) or n_cases < MIN_CASES:
        raise ConfigError(f"coach.audit_cases is {n_cases}; allowed: {MIN_CASES} or more")
    name = case_set(cfg)
    cases = CASES[name](cfg.seed, n_cases)
    folder = cache_root() / "audits" / audit_digest(cfg.coach, cases)
    report = _known(cfg, folder) or _audited_once(cfg, folder, cases)
    figure = report["figures"]["blame_accuracy"]
    command = f"mappa audit cases={name} n_cases={n_cases} seed={cfg.seed}, with the same coach=… and coach.KEY=…"
    advice = f" (coach.min_audit); see {folder / REPORT}, or run: {command}"
    require_audit(report, floor, advice, max_missing=max_missing_rate(cfg.coach))
    print(f"coach {report['coach']} blames the right agent in {figure['value']:.3f} of {figure['n']} audit cases")


def _known(cfg: DictConfig, folder: Path) -> dict[str, Any] | None:
    """None too where a run that allowed for more missing verdicts has left a report that is none for this one."""
    try:
        report = read_json(folder / REPORT)
        require_verdicts(report, max_missing_rate(cfg.coach))
    except (DataError, CoachError):
        return None
    return report


def _audited_once(cfg: DictConfig, folder: Path, cases: Sequence[AuditCase]) -> dict[str, Any]:
    """By this run, or by another that holds the lock; one whose process ends gives it up."""
    lock = FileLock(folder / LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=cfg.runtime.deadline_s)
    except Timeout:
        raise InfrastructureError(
            f"another run has audited this coach for longer than runtime.deadline_s={cfg.runtime.deadline_s}: wait "
            f"for it or stop it ({folder})"
        ) from None
    except OSError as error:
        raise InfrastructureError(f"cannot write {folder}: {error.strerror or error}") from error
    try:
        return _known(cfg, folder) or _audited(cfg, folder, cases)
    finally:
        lock.release()


def _audited(cfg: DictConfig, folder: Path, cases: Sequence[AuditCase]) -> dict[str, Any]:
    coach: Coach = build(cfg.coach, "coach")

    async def ask() -> dict[str, Any]:
        await check_coach(coach)
        bind_accounts(coach, folder)
        watch, deadline_s = missing_watch(cfg.coach), cfg.runtime.deadline_s
        return await audit_coach(coach, cases, seed=cfg.seed, names=ASKED_ONCE, watch=watch, deadline_s=deadline_s)

    try:
        _share_caps(cfg, coach)
        try:
            report = asyncio.run(ask())
            require_verdicts(report, max_missing_rate(cfg.coach))
        except CoachError as error:
            reason = CoachError(str(error).partition("; go on with")[0])
            ended = not_ended("the audit of coach.min_audit", coach, reason)
            raise CoachError(
                f"{ended} (caps: coach.audit_budget_usd, coach.audit_budget_calls, and the coach's own)"
            ) from error
    finally:
        close_coach(coach)
    write_json(folder / REPORT, report)
    _print_costs(report["accounts"])
    return report


def _share_caps(cfg: DictConfig, coach: Coach) -> None:
    """Those of the audit hold for all the coaches in `coach` together."""
    usd, calls = cfg.coach.get("audit_budget_usd"), cfg.coach.get("audit_budget_calls")
    given = f"coach.audit_budget_usd={usd}, coach.audit_budget_calls={calls}"
    for cap, kinds in ((usd, int | float), (calls, int)):
        if cap is not None and (isinstance(cap, bool) or not isinstance(cap, kinds) or not 0 <= cap < float("inf")):
            raise ConfigError(f"{given}; allowed: 0 or more dollars and calls, or null for no cap")
    if usd is None and calls is None:
        return
    budget = Budget(usd=usd, calls=calls, key="coach.audit")
    for part in {id(part): part for part in with_parts(coach)}.values():
        if isinstance(part, SharesBudget):
            try:
                part.share(budget)
            except ConfigError as error:
                raise ConfigError(f"{given} cannot be held: {error}") from error


def _print_costs(costs: Mapping[str, Any]) -> None:
    if costs.get("calls"):
        usd = "unknown" if costs.get("usd") is None else f"{costs['usd']:.4f}"
        print(f"calls of the audit, which no budget of the run counts: {costs['calls']}, dollars: {usd}")
