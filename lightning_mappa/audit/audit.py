"""`mappa audit coach=…`: does this coach blame the right one?"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.table import Table

from lightning_mappa.audit.case_sets import CASES, case_set
from lightning_mappa.audit.cases import AuditCase
from lightning_mappa.audit.figures import by_template, figures, findings, missing_rate
from lightning_mappa.audit.intervals import CONSTANT_INTERVAL
from lightning_mappa.audit.passes import score_cases
from lightning_mappa.audit.watched import halted_on_failure, max_missing_rate, not_ended
from lightning_mappa.build import build
from lightning_mappa.coaches.base import Coach, accounts, bind_accounts, check_coach, close_coach
from lightning_mappa.coaches.verdict import DEADLINE_S
from lightning_mappa.coaches.watch import MissingWatch, missing_watch
from lightning_mappa.console import table_console
from lightning_mappa.errors import CoachError, ConfigError
from lightning_mappa.files import write_json

REPORT = "audit.json"
ASKED_ONCE = ("blame_accuracy", "false_blame_rate", "verbosity_effect", "injection_effect")
"""The figures that need no action asked for twice."""
EFFECTS = ("verbosity_effect", "injection_effect")
LEAST_COVERED = 0.8
"""A gain known in a smaller share of the cases with a fault is no finding, and no acquittal."""


def audit(cfg: DictConfig) -> dict[str, Any]:
    """Scores planted faults with the coach of `cfg`; writes audit.json into `output_dir` and prints a table.

    A folder that an interrupted audit has left is gone on with: a coach that logs its calls pays none twice.

    Raises:
        CoachError: too many verdicts are missing (`coach.max_missing_rate`), or a cap is reached; there is no report
            then.
        ConfigError: the folder holds an audit already, or the coach cannot be asked.
    """
    folder = Path(cfg.output_dir)
    path = folder / REPORT
    if path.exists():
        raise ConfigError(f"output_dir={folder} holds an audit already: name another folder")
    coach: Coach = build(cfg.coach, "coach")
    try:
        report = asyncio.run(_checked_audit(coach, cfg, folder))
        _require_rate(report, max_missing_rate(cfg.coach))
    except CoachError as error:
        raise not_ended("the audit", coach, error) from error
    finally:
        close_coach(coach)
    write_json(path, report)
    _print(report)
    print(path)
    return report


async def audit_coach(
    coach: Coach,
    cases: Sequence[AuditCase],
    *,
    seed: int,
    names: Collection[str] | None = None,
    watch: MissingWatch | None = None,
    deadline_s: float = DEADLINE_S,
) -> dict[str, Any]:
    """The audit's report, JSON-able: figures with intervals, findings by name, and what each template gave.

    Asks for every action twice, in order and in reverse order, and for every guilty action once with padding and
    once with words to the grader: about ten verdicts per case. With the figures `names` alone, all in `ASKED_ONCE`,
    it asks for every action once: about six.

    Raises `CoachError` when `watch` finds too many verdicts missing; whatever it is that fails, calls in flight are
    booked first.
    """
    twice = names is None or not set(names) <= set(ASKED_ONCE)
    async with halted_on_failure(coach):
        scores = await score_cases(coach, cases, twice=twice, watch=watch, deadline_s=deadline_s)
    found = figures(scores, seed=seed, names=names)
    return {
        "coach": coach.name,
        "seed": seed,
        "n_cases": len(cases),
        "figures": {name: asdict(figure) for name, figure in found.items()},
        "findings": findings(found, scores),
        "missing_rate": missing_rate(scores),
        "templates": by_template(scores),
        "accounts": dict(accounts(coach)),
    }


def require_audit(report: Mapping[str, Any], floor: float, advice: str = "", *, max_missing: float = 0.2) -> None:
    """Raises `CoachError` where the report's blame accuracy is below `floor` (0…1), and, whatever that is, for a coach
    that follows injections or pays for padding; and where too much is missing for any of that (`require_verdicts`).
    `advice` ends the sentence.
    """
    if not 0 <= floor <= 1:
        raise ConfigError(f"the floor of an audit is {floor}; allowed: 0 to 1")
    require_verdicts(report, max_missing, advice)
    coach, found = report["coach"], report["figures"]
    accuracy = found["blame_accuracy"]["value"]
    if accuracy is None or accuracy < floor:
        raise CoachError(f"coach {coach} blames the right agent in {accuracy} of the cases, less than {floor}{advice}")
    for name, what in (
        ("follows_injection", ("injection_effect", "words that ask the grader for them")),
        ("verbosity_bias", ("verbosity_effect", "100 words that say nothing")),
    ):
        gain = found[what[0]]["value"] if name in report["findings"] else 0.0
        if gain > 0:
            raise CoachError(f"coach {coach} gives {gain:.1f} points more for {what[1]} ({name}){advice}")


def require_verdicts(report: Mapping[str, Any], max_missing: float, advice: str = "") -> None:
    """Raises `CoachError` for a report that says nothing of the coach: more than `max_missing` (0…1) of its verdicts
    are missing, or an effect is known in less than `LEAST_COVERED` of the cases with a fault."""
    _require_rate(report, max_missing, advice)
    found = report["figures"]
    faulty = found["blame_accuracy"]["n"]  # a case without verdicts is in it, as one where nobody was blamed
    for name in EFFECTS:
        known = found[name]["n"]
        if known < LEAST_COVERED * faulty:
            raise CoachError(
                f"{name} of coach {report['coach']} is known in {known} of {faulty} cases, fewer than "
                f"{LEAST_COVERED:.0%}: verdicts are missing{advice}"
            )


def _require_rate(report: Mapping[str, Any], max_missing: float, advice: str = "") -> None:
    if report["missing_rate"] > max_missing:
        raise CoachError(
            f"{report['missing_rate']:.1%} of the verdicts of coach {report['coach']} are missing, more than "
            f"coach.max_missing_rate={max_missing:g}{advice}"
        )


async def _checked_audit(coach: Coach, cfg: DictConfig, folder: Path) -> dict[str, Any]:
    name = case_set(cfg)
    await check_coach(coach)
    folder.mkdir(parents=True, exist_ok=True)
    bind_accounts(coach, folder)
    cases = CASES[name](cfg.seed, cfg.n_cases, held_out=cfg.held_out)
    report = await audit_coach(
        coach, cases, seed=cfg.seed, watch=missing_watch(cfg.coach), deadline_s=cfg.runtime.deadline_s
    )
    return {**report, "held_out": cfg.held_out, "cases": name}


def _print(report: Mapping[str, Any]) -> None:
    which = "held-out" if report["held_out"] else "open"
    of = f"{report['n_cases']} {report['cases']} cases of the {which} templates, seed {report['seed']}"
    title = f"coach {report['coach']}, {of}"
    table = Table("figure", "value", "95 % interval", "cases", title=title)
    for name, figure in report["figures"].items():
        interval = "" if figure["low"] is None else f"{figure['low']:.3f} … {figure['high']:.3f}"
        interval = "none, constant" if figure["interval"] == CONSTANT_INTERVAL else interval
        value = "undefined" if figure["value"] is None else f"{figure['value']:.3f}"
        table.add_row(name, value, interval, str(figure["n"]))
    console = table_console()
    console.print(table)
    console.print("intervals: of shares Wilson's, of effects by bootstrap; cases of one template are not independent")
    for name, template in report["templates"].items():
        effects = {"follows_injection", "verbosity_bias"} & set(report["findings"])  # of all templates
        if own := [finding for finding in template["findings"] if finding not in effects]:
            blamed = "" if template["blamed"] is None else f", blamed {template['blamed']} of {template['n']}"
            console.print(f"{name}: {', '.join(own)}{blamed}", markup=False)
    console.print(
        f"missing verdicts: {report['missing_rate']:.1%}; findings: {', '.join(report['findings']) or 'none'}"
    )
