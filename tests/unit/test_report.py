"""What is said of the report split, and that it is read once."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from lightning_mappa.errors import ConfigError
from lightning_mappa.report import (
    READINGS,
    TEST,
    peak_and_selected,
    peak_of,
    reading,
    refuse_second_reading,
    refuse_shared_problems,
    report_figures,
    report_text,
)
from lightning_mappa.run_folder import RunFolder
from lightning_mappa.statistics.intervals import cluster_bootstrap, wilson
from lightning_mappa.types import Task
from tests.unit.factories import make_scored

BEFORE = [4] * 10 + [3] * 3 + [2] * 3 + [1] * 4 + [0] * 10  # 59 of 120
AFTER = [4] * 9 + [3] + [4, 3, 2] + [4, 4, 2] + [4, 3, 2, 1] + [4, 2, 2, 1, 1, 1, 0, 0, 0, 1]  # 80 of 120
SELECTION = {"peak": {"version": 3, "success": 0.9}, "selected": {"version": 2, "success": 0.8}}


def episodes(counts, of=4, kind="x"):
    """One task per count, so many of its samples right; wrong ones give different answers."""
    return [
        make_scored(
            f"{i}-{j}",
            [],
            [],
            task=Task(id=f"t{i}", kind=kind, prompt=f"problem {i}"),
            outcome=float(j < count),
            answer="7" if j < count else str(10 + j),
            sample=j,
        )
        for i, count in enumerate(counts)
        for j in range(of)
    ]


def test_figures_of_four_samples_on_thirty_problems():
    result = report_figures(episodes(BEFORE), episodes(AFTER), k=4, seed=0)
    assert result["n"] == 30
    assert (result["initial"], result["selected"]) == (pytest.approx(59 / 120), pytest.approx(80 / 120))
    assert result["significant"] is True
    assert set(result["figures"]) == {"mean@4", "pass@2", "pass@4", "maj@4"}
    figure = result["figures"]["pass@4"]
    assert (figure["initial"], figure["selected"]) == (pytest.approx(20 / 30), pytest.approx(27 / 30))
    assert all(figure["p_holm"] >= figure["p_value"] for figure in result["figures"].values())
    assert result["figures"]["mean@4"]["gain"] == pytest.approx(result["gain"])
    found = cluster_bootstrap({str(i): [count / 4] for i, count in enumerate(AFTER)}, seed=0)
    assert result["selected_ci"] == [found.low, found.high]


def test_arrival_changes_nothing():
    shuffled = episodes(AFTER)
    random.Random(0).shuffle(shuffled)
    reference = report_figures(episodes(BEFORE), episodes(AFTER), k=4, seed=0)
    assert report_figures(episodes(BEFORE), shuffled, k=4, seed=0) == reference


def test_two_of_thirty_are_reported_as_not_significant():
    result = report_figures(episodes([1] * 12 + [0] * 18, of=1), episodes([1] * 14 + [0] * 16, of=1), k=1, seed=0)
    assert result["significant"] is False
    assert "not significant" in report_text({**result, "selection": SELECTION})
    assert list(result["figures"]) == ["success"]
    found = wilson(12, 30)
    assert result["initial_ci"] == [found.low, found.high]


def test_the_text_shows_peak_and_selected_side_by_side_and_names_examples():
    result = report_figures(episodes(BEFORE, kind="fixture/amc"), episodes(AFTER, kind="fixture/amc"), k=4, seed=0)
    text = report_text({**result, "selection": SELECTION})
    assert text.startswith("report split (fixture/amc), n = 30: 0.492 → 0.667, gain +0.175 [")
    assert ": significant" in text.splitlines()[0]
    assert "pass@4: 0.667 → 0.900" in text
    assert "peak 0.900 at version 3, selected 0.800 at version 2" in text


def test_the_earliest_of_equal_peaks():
    history = {"0": 0.5, "2": 0.9, "10": 0.9, "4": None}
    assert peak_of(history, 10) == {
        "peak": {"version": 2, "success": 0.9},
        "selected": {"version": 10, "success": 0.9},
    }
    assert peak_of(history, 4)["selected"] is None
    assert peak_of({}, None) == {"peak": None, "selected": None}


# -- read once --------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.yaml").touch()
    return RunFolder.open(tmp_path)


def events(folder):
    return [json.loads(line)["event"] for line in (folder.path / READINGS).read_text().splitlines()]


def test_a_reading_is_recorded_and_cannot_be_repeated(folder):
    refuse_second_reading(folder)
    with reading(folder, limit=8):
        assert events(folder) == ["begun"]
        refuse_second_reading(folder)  # no figure has been seen yet
    assert events(folder) == ["begun", "read"]
    first = json.loads((folder.path / READINGS).read_text().splitlines()[0])
    assert first["limit"] == 8
    assert first["at"].endswith("+00:00")
    with pytest.raises(ConfigError, match=r"has been read already: see .*report_readings"):
        refuse_second_reading(folder)


def test_a_reading_that_breaks_off_is_recorded_and_may_be_repeated(folder):
    with pytest.raises(KeyError), reading(folder):
        raise KeyError("engine")
    assert events(folder) == ["begun", "broken off"]
    refuse_second_reading(folder)


def test_figures_of_an_earlier_version_count_as_read(folder):
    (folder.path / TEST).write_text("{}")
    with pytest.raises(ConfigError, match=r"has been read already: see .*test\.json"):
        refuse_second_reading(folder)


def test_a_run_without_summary_has_no_peak(folder):
    assert peak_and_selected(folder, 3) == {"peak": None, "selected": None}


class Splits:
    def __init__(self, **prompts):
        self._prompts = prompts

    def tasks(self, split):
        return [Task(id=f"{split}-{i}", kind="x", prompt=prompt) for i, prompt in enumerate(self._prompts[split])]


def test_a_report_problem_that_was_selected_on_is_refused():
    fine = Splits(train=["one"], selection=["two"], report=["three"])
    refuse_shared_problems(fine)
    for split in ("train", "selection"):
        prompts = {"train": ["one"], "selection": ["two"], "report": ["three"]} | {split: ["one two", "Three!"]}
        with pytest.raises(ConfigError, match=f"1 problems of the {split} split are in the report split.*{split}-1"):
            refuse_shared_problems(Splits(**prompts))


def test_tables_with_the_same_text_are_told_apart_by_their_files():
    class Tables(Splits):
        def tasks(self, split):
            return [replace(task, metadata={"table_fingerprint": data}) for task, data in self._prompts[split]]

    def task(name):
        return Task(id=name, kind="x", prompt="Predict rent.")

    train, other, report = (task("train"), "a"), (task("other"), "b"), (task("report"), "c")
    refuse_shared_problems(Tables(train=[train], selection=[other], report=[report]))
    with pytest.raises(ConfigError, match="1 problems of the selection split are in the report split"):
        refuse_shared_problems(Tables(train=[train], selection=[(task("other"), "c")], report=[report]))
