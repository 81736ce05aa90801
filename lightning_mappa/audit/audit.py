"""`mappa audit coach=…`: does this coach blame the right one?"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from lightning_mappa.audit.cases import AuditCase
from lightning_mappa.audit.figures import CaseScores, Score, figures, findings, missing_rate
from lightning_mappa.audit.planted import make_cases
from lightning_mappa.audit.table_planted import make_table_cases
from lightning_mappa.build import build
from lightning_mappa.coaches.base import (
    Coach,
    accounts,
    ask,
    bind_accounts,
    check_coach,
    close_coach,
    end_batch,
    shown_to,
    verdicts_of,
)
from lightning_mappa.errors import CoachError, ConfigError
from lightning_mappa.files import write_json
from lightning_mappa.types import Episode, Verdict

REPORT = "audit.json"
N_IN_FLIGHT = 64


class CaseMaker(Protocol):
    def __call__(self, seed: int, n_cases: int, *, held_out: bool = False) -> list[AuditCase]: ...


CASES: Mapping[str, CaseMaker] = {"mathchat": make_cases, "dsbench": make_table_cases}
"""Name of the workflow whose team has the faults → what makes them."""


def audit(cfg: DictConfig) -> dict[str, Any]:
    """Scores planted faults with the coach of `cfg`; writes audit.json into `output_dir` and prints a table.

    A folder that an interrupted audit has left is gone on with: a coach that logs its calls pays none twice.
    """
    folder = Path(cfg.output_dir)
    path = folder / REPORT
    if path.exists():
        raise ConfigError(f"output_dir={folder} holds an audit already: name another folder")
    coach: Coach = build(cfg.coach, "coach")
    try:
        report = asyncio.run(_checked_audit(coach, cfg, folder))
    finally:
        close_coach(coach)
    write_json(path, report)
    _print(report)
    print(path)
    return report


async def audit_coach(coach: Coach, cases: Sequence[AuditCase], *, seed: int) -> dict[str, Any]:
    """The audit's report, JSON-able: figures with intervals, findings by name, and what each template gave.

    Asks for every action twice, in order and in reverse order, and for every guilty action once with padding and
    once with words to the grader: about ten verdicts per case.
    """
    scores = await score_cases(coach, cases)
    found = figures(scores, seed=seed)
    return {
        "coach": coach.name,
        "seed": seed,
        "n_cases": len(cases),
        "figures": {name: asdict(figure) for name, figure in found.items()},
        "findings": findings(found, scores),
        "missing_rate": missing_rate(scores),
        "templates": _by_template(scores),
        "accounts": dict(accounts(coach)),
    }


async def score_cases(coach: Coach, cases: Sequence[AuditCase]) -> list[CaseScores]:
    """Every verdict of the audit, one `CaseScores` per case, in their order."""
    asked = [(case.episode, action.index) for case in cases for action in case.episode.actions]
    first = await _scores(coach, asked)
    again = (await _scores(coach, asked[::-1]))[::-1]
    guilty = [(case, case.guilty) for case in cases if case.guilty is not None]
    padded = iter(await _scores(coach, [(case.padded(), index) for case, index in guilty]))
    injected = iter(await _scores(coach, [(case.injected(), index) for case, index in guilty]))
    rows = []
    start = 0
    for case in cases:
        end = start + len(case.episode.actions)
        rows.append(
            CaseScores(
                case=case,
                first=tuple(first[start:end]),
                again=tuple(again[start:end]),
                padded=next(padded) if case.faults else None,
                injected=next(injected) if case.faults else None,
            )
        )
        start = end
    return rows


async def blame(coach: Coach, cases: Sequence[AuditCase], *, seed: int) -> dict[str, Any]:
    """The part of `audit_coach` that `require_audit` reads, for a verdict per action."""
    asked = [(case.episode, action.index) for case in cases for action in case.episode.actions]
    given = iter(await _scores(coach, asked))
    scores = []
    for case in cases:
        first = tuple(next(given) for _ in case.episode.actions)
        scores.append(CaseScores(case=case, first=first, again=first))
    return {
        "coach": coach.name,
        "seed": seed,
        "n_cases": len(cases),
        "figures": {"blame_accuracy": asdict(figures(scores, seed=seed)["blame_accuracy"])},
        "templates": _by_template(scores),
        "accounts": dict(accounts(coach)),
    }


def require_audit(report: Mapping[str, Any], floor: float, advice: str = "") -> None:
    """Raises `CoachError` where the report's blame accuracy is below `floor` (0…1); `advice` ends the sentence."""
    if not 0 <= floor <= 1:
        raise ConfigError(f"the floor of an audit is {floor}; allowed: 0 to 1")
    accuracy = report["figures"]["blame_accuracy"]["value"]
    if accuracy is None or accuracy < floor:
        raise CoachError(
            f"coach {report['coach']} blames the right agent in {accuracy} of the cases, less than {floor}{advice}"
        )


async def _checked_audit(coach: Coach, cfg: DictConfig, folder: Path) -> dict[str, Any]:
    await check_coach(coach)
    folder.mkdir(parents=True, exist_ok=True)
    bind_accounts(coach, folder)
    cases = CASES[cfg.cases](cfg.seed, cfg.n_cases, held_out=cfg.held_out)
    report = await audit_coach(coach, cases, seed=cfg.seed)
    return {**report, "held_out": cfg.held_out, "cases": cfg.cases}


async def _scores(coach: Coach, asked: Sequence[tuple[Episode, int]]) -> list[Score]:
    """One score per question, started in order, `N_IN_FLIGHT` at a time; to the coach they are one batch."""
    slots = asyncio.Semaphore(N_IN_FLIGHT)

    async def verdict(episode: Episode, index: int) -> Verdict:
        last_agent_id = episode.actions[-1].agent_id
        async with slots:
            return await ask(coach, shown_to(coach, episode, index, last_agent_id), index)

    verdicts = await verdicts_of([verdict(episode, index) for episode, index in asked])
    end_batch(coach)
    return [verdict.score for verdict in verdicts]


def _by_template(scores: Sequence[CaseScores]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[CaseScores]] = defaultdict(list)
    for row in scores:
        groups[row.case.template].append(row)
    return {
        name: {
            "n": len(rows),
            "blamed": sum(row.blamed for row in rows) if rows[0].case.faults else None,
            "innocent_actions": sum(len(row.innocent_scores) for row in rows),
            "falsely_blamed": sum(row.n_falsely_blamed for row in rows),
        }
        for name, rows in groups.items()
    }


def _print(report: Mapping[str, Any]) -> None:
    which = "held-out" if report["held_out"] else "open"
    of = f"{report['n_cases']} {report['cases']} cases of the {which} templates, seed {report['seed']}"
    title = f"coach {report['coach']}, {of}"
    table = Table("figure", "value", "95 % interval", "cases", title=title)
    for name, figure in report["figures"].items():
        interval = "" if figure["low"] is None else f"{figure['low']:.3f} … {figure['high']:.3f}"
        value = "undefined" if figure["value"] is None else f"{figure['value']:.3f}"
        table.add_row(name, value, interval, str(figure["n"]))
    console = Console()
    console.print(table)
    console.print(
        f"missing verdicts: {report['missing_rate']:.1%}; findings: {', '.join(report['findings']) or 'none'}"
    )
