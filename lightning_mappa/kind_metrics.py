"""Success and scores per kind of task: whether a team, or its coach, prefers one kind to another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from lightning_mappa.metrics import mean_scores
from lightning_mappa.types import ScoredEpisode


def kind_metrics(episodes: Iterable[ScoredEpisode], agents: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Kind of task → `episodes`, `success` over the graded ones, and in `score` each agent's mean verdict.

    A mean over nothing is left out. Kinds come by name, agents in the order of `agents`.
    """
    of_kind: dict[str, list[ScoredEpisode]] = defaultdict(list)
    for scored in episodes:
        of_kind[scored.episode.task.kind].append(scored)
    return {kind: _figures(found, agents) for kind, found in sorted(of_kind.items())}


def _figures(episodes: Sequence[ScoredEpisode], agents: Sequence[str]) -> dict[str, Any]:
    scores = mean_scores(episodes)
    graded = [scored.episode.outcome for scored in episodes if scored.episode.outcome is not None]
    return {
        "episodes": len(episodes),
        **({"success": fmean(graded)} if graded else {}),
        "score": {agent: scores[agent] for agent in agents if agent in scores},
    }
