"""`datamodule.val_scored`: the coach scores evaluations too, and what is trained is the same to the byte."""

from __future__ import annotations

import json

import pytest

from lightning_mappa.coaches.base import coach_snapshot
from lightning_mappa.coaches.rules import RulesCoach
from lightning_mappa.coaches.shuffled import ShuffledCoach
from lightning_mappa.coaches.stateful import CalibratedCoach
from lightning_mappa.errors import ConfigError
from lightning_mappa.fit import fit
from lightning_mappa.rollout.transcripts import read_episodes
from lightning_mappa.testing import ScriptedCoach
from tests.integration.conftest import run_fit, small_config, untimed_lines
from tests.unit.rollout.test_coordinator import collect, make

MEMORIES = {
    "coach=shuffled": ("coach=shuffled",),
    "coach=calibrated": ("coach=calibrated", "coach.min_count=2", "coach.decay=0.5"),
}
COACHES = {
    "shuffled": lambda: ShuffledCoach(RulesCoach()),
    "calibrated": lambda: CalibratedCoach(RulesCoach(), min_count=1),
    "shuffled in calibrated": lambda: CalibratedCoach(ShuffledCoach(RulesCoach()), min_count=1),
}


@pytest.mark.parametrize("name", COACHES)
def test_a_scored_evaluation_leaves_the_coach_as_it_was(name):
    fresh, coach, twin = COACHES[name](), COACHES[name](), COACHES[name]()
    for judged, splits in ((coach, ("selection", "train", "selection", "train")), (twin, ("train", "train"))):
        coordinator = make(coach=judged)
        for split in splits:
            found = collect(coordinator, split=split)
            assert all(scored.verdicts[0].score is not None for scored in found.episodes)
    assert coach_snapshot(coach) == coach_snapshot(twin) != coach_snapshot(fresh)


@pytest.mark.parametrize("name", MEMORIES)
def test_what_is_trained_is_the_same_with_evaluations_scored_or_not(tmp_path, name):
    plain, scored = tmp_path / "plain", tmp_path / "scored"
    run_fit(plain, *MEMORIES[name])
    run_fit(scored, *MEMORIES[name], "datamodule.val_scored=true")
    for step in range(2):
        transcript = f"step-{step:06d}.jsonl"
        assert untimed_lines(plain, transcript) == untimed_lines(scored, transcript)

    for folder, is_scored in ((plain, False), (scored, True)):
        verdicts = [
            verdict
            for path in sorted((folder / "transcripts").glob("selection-*.jsonl"))
            for episode in read_episodes(path)
            for verdict in episode.verdicts
        ]
        assert verdicts
        assert all((verdict.score is not None) == is_scored for verdict in verdicts)


def test_evaluations_say_how_they_were_scored(tmp_path):
    cfg = small_config(
        tmp_path / "run", "datamodule.val_scored=true", "callbacks.checkpoint_selection.monitor=val/score/solver"
    )
    summary = fit(cfg)
    val = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["val"]
    for agent in ("solver", "executor", "verifier"):
        assert 0 < val[f"score/{agent}"] < 10
        assert val[f"score_missing/{agent}"] == 0
    assert summary["selected_version"] is not None


def test_a_coach_that_remembers_needs_evaluations_between_rollouts(tmp_path):
    cfg = small_config(
        tmp_path / "run",
        "coach=shuffled",
        "runtime.max_staleness=1",
        "datamodule.val_scored=true",
        "algorithm.rollout_correction=2",
    )
    with pytest.raises(ConfigError, match=r"datamodule\.val_scored=true .*allowed: runtime\.max_staleness=0"):
        fit(cfg)
    assert not (tmp_path / "run").exists()


class Forgetful(ScriptedCoach):
    """Learns, and cannot be put back."""

    def __init__(self) -> None:
        super().__init__(lambda episode, index: 5.0)

    def end_of_batch(self) -> None:
        pass


def test_a_coach_that_cannot_be_put_back_is_refused(tmp_path):
    target = f"coach._target_={Forgetful.__module__}.Forgetful"
    cfg = small_config(tmp_path / "run", target, "datamodule.val_scored=true")
    with pytest.raises(ConfigError, match=r"learns from batches and has no state_dict"):
        fit(cfg)
