"""Runs against each other, on run folders written by hand."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightning_mappa.compare.compare import compare
from lightning_mappa.compare.conditions import compare_runs
from lightning_mappa.compare.runs import find_runs, load_runs
from lightning_mappa.compare.tables import SELECTION_NOTE
from lightning_mappa.errors import ConfigError, ExitCode
from lightning_mappa.rollout.transcripts import evaluation_path, write_transcript
from lightning_mappa.types import Task
from tests.packages import needs
from tests.unit.factories import make_action, make_scored

PROBLEMS = 20


def episodes(outcomes: dict[str, list[float]], seed: int) -> list:
    played = [
        make_scored(
            f"{task}-{sample}",
            [make_action(episode_id=f"{task}-{sample}", index=i) for i in range(2)],
            [None, None],
            task=Task(id=task, kind="x", prompt=task),
            outcome=outcome,
            sample=sample,
        )
        for task, samples in outcomes.items()
        for sample, outcome in enumerate(samples)
    ]
    random.Random(seed).shuffle(played)
    return played


def write_run(path: Path, *, seed: int, initial: int, selected: int, report: bool = True, samples: int = 1, **config):
    """A run that solves the first `initial` and then the first `selected` of its problems."""
    path.mkdir(parents=True)
    base = {"seed": seed, "output_dir": str(path), "task": {"seed": seed, "n": 3}, "algorithm": {"reward": "process"}}
    OmegaConf.save(OmegaConf.merge(base, config), path / "config.yaml")
    (path / "transcripts").mkdir()
    names = (
        ("report-initial.jsonl", "report-selected.jsonl")
        if report
        else tuple(evaluation_path(Path(), "selection", version).name for version in (0, 4))
    )
    for name, right in zip(names, (initial, selected), strict=True):
        outcomes = {f"p{i}": [float(i < right)] * samples for i in range(PROBLEMS)}
        write_transcript(path / "transcripts" / name, episodes(outcomes, seed), step=0, split="report")
    if report:
        (path / "test.json").write_text("{}")
    (path / "summary.json").write_text(json.dumps({"status": "done", "selected_version": 4}))
    return path


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """B solves 8 problems more than A, on each of three seeds."""
    return [
        *(write_run(tmp_path / f"a{s}", seed=s, initial=4, selected=8 + s) for s in range(3)),
        *(
            write_run(tmp_path / f"b{s}", seed=s, initial=4, selected=16 + s, algorithm={"reward": "outcome"})
            for s in range(3)
        ),
    ]


def compared(paths):
    return compare_runs(load_runs(find_runs(paths)))


def test_runs_are_grouped_by_config_and_not_by_seed(runs):
    comparison = compared(runs)
    assert [(group.name, tuple(group.runs)) for group in comparison.groups] == [("A", (0, 1, 2)), ("B", (0, 1, 2))]
    assert comparison.differing == {"algorithm.reward": ("process", "outcome")}
    assert comparison.split == "report"


def test_figures_of_a_group_by_hand(runs):
    group = compared(runs).groups[0]
    assert group.initial == pytest.approx(4 / 20)
    assert group.selected == pytest.approx(9 / 20)
    assert group.gain == pytest.approx(5 / 20)
    # .40, .45, .50: standard deviation .05, t = 4.3027
    interval = group.selected_over_seeds
    assert interval is not None
    assert interval.high - interval.value == pytest.approx(4.302653 * 0.05 / 3**0.5, rel=1e-5)
    assert group.gain_over_problems.low < 5 / 20 < group.gain_over_problems.high


def test_the_difference_is_paired_by_seed_and_problem(runs):
    (versus,) = compared(runs).versus
    assert versus.seeds == (0, 1, 2)
    assert versus.over_problems is not None
    assert versus.over_problems.n == PROBLEMS
    assert versus.over_problems.gain.value == pytest.approx(8 / 20)
    assert versus.over_seeds is not None
    assert versus.over_seeds.low == pytest.approx(8 / 20)  # the same on every seed
    assert versus.significant


def test_pairing_leaves_out_what_one_side_has_not(tmp_path):
    first = [write_run(tmp_path / f"a{s}", seed=s, initial=0, selected=2) for s in (0, 1, 2)]
    other = [write_run(tmp_path / f"b{s}", seed=s, initial=0, selected=20, lr=1) for s in (2, 3)]
    (versus,) = compared([*first, *other]).versus
    assert versus.seeds == (2,)
    assert versus.over_seeds is None
    assert versus.over_problems is not None
    assert versus.over_problems.gain.value == pytest.approx(18 / 20)
    alone = compared([first[0], other[1]])
    assert alone.versus[0].over_problems is None
    assert not alone.versus[0].significant


def test_two_more_problems_are_not_significant(tmp_path):
    first = write_run(tmp_path / "a", seed=0, initial=4, selected=8)
    other = write_run(tmp_path / "b", seed=0, initial=4, selected=10, lr=1)
    (versus,) = compared([first, other]).versus
    assert not versus.significant


def test_p_values_are_corrected_for_the_number_of_groups(runs, tmp_path):
    # Six more of 20: 2 / 2^6 = .031 by itself, twice that among two.
    third = write_run(tmp_path / "c", seed=0, initial=4, selected=14, lr=2)
    fourth = write_run(tmp_path / "d", seed=0, initial=4, selected=14, lr=3)
    alone = compared([runs[0], third]).versus[0]
    assert alone.p_holm == pytest.approx(2 / 64)
    assert alone.significant
    both = compared([runs[0], third, fourth])
    assert [v.p_holm for v in both.versus] == [pytest.approx(4 / 64)] * 2
    assert not any(v.significant for v in both.versus)


def test_several_samples_of_a_problem_count_once(tmp_path):
    once = compared([write_run(tmp_path / "a", seed=0, initial=4, selected=8)]).groups[0]
    often = compared([write_run(tmp_path / "b", seed=0, initial=4, selected=8, samples=5)]).groups[0]
    assert often.gain_over_problems == once.gain_over_problems


def test_how_a_run_was_made_makes_no_other_condition(tmp_path):
    one, two = tmp_path / "a", tmp_path / "b"
    for seed, path in enumerate((one, two)):
        write_run(
            path,
            seed=seed,
            initial=4,
            selected=8,
            runtime={"num_threads": seed},
            resume=f"x{seed}",
            logger={"csv": {"save_dir": f"{path}/csv"}},
            callbacks={"mine": {"folder": f"{path}/mine"}},
        )
    assert len(compared([one, two]).groups) == 1
    three = write_run(tmp_path / "c", seed=2, initial=4, selected=8, callbacks={"mine": {"folder": "/other"}})
    assert len(compared([one, two, three]).groups) == 2


def test_a_sweep_is_compared_as_a_whole(tmp_path):
    for number in range(11):
        write_run(tmp_path / "sweep" / str(number), seed=number, initial=4, selected=8)
    assert [path.name for path in find_runs([tmp_path / "sweep"])] == [str(number) for number in range(11)]
    assert len(compared([tmp_path / "sweep"]).groups[0].runs) == 11


def test_without_report_figures_the_selection_split_stands_in_and_says_so(tmp_path, capsys):
    read = write_run(tmp_path / "a", seed=0, initial=4, selected=8)
    unread = write_run(tmp_path / "b", seed=1, initial=4, selected=8, report=False)
    with pytest.raises(ConfigError, match=r"a has no selection-000000\.jsonl"):
        compared([read, unread])
    assert compare([str(unread)]) is ExitCode.DONE
    assert SELECTION_NOTE in " ".join(capsys.readouterr().out.split())


# -- the command ------------------------------------------------------------------------------------------------


def test_the_tables(runs, capsys):
    assert compare(list(map(str, runs))) is ExitCode.DONE
    shown = capsys.readouterr().out
    for text in ("success on the report split", "algorithm.reward", "+0.400", "0, 1, 2", "significant"):
        assert text in shown
    assert "says next to nothing" not in shown


def test_the_data(runs, capsys):
    compare([*map(str, runs), "--json"])
    data = json.loads(capsys.readouterr().out)
    assert data["differing"] == {"algorithm.reward": ["process", "outcome"]}
    (versus,) = data["versus"]
    assert versus["difference"] == pytest.approx(0.4)
    assert versus["ci_over_problems"][0] > 0
    assert versus["significant"] is True
    assert data["groups"][1]["runs"] == list(map(str, runs[3:]))


@needs("matplotlib")
def test_the_picture(runs, tmp_path, capsys):
    file = tmp_path / "new" / "figure.png"
    compare([*map(str, runs), "--plot", str(file)])
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_another_kind_is_refused(runs, tmp_path, capsys):
    with pytest.raises(ConfigError, match=r"allowed are files that end in \.png, \.svg or \.pdf"):
        compare([str(runs[0]), "--plot", str(tmp_path / "figure.jpeg")])


def test_matplotlib_is_an_extra(runs, tmp_path, capsys, monkeypatch):
    from lightning_mappa.compare import plot

    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(plot.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"lightning-mappa\[plot\]"):
        compare([str(runs[0]), "--plot", str(tmp_path / "figure.png")])


def test_mistakes_are_named(runs, tmp_path):
    with pytest.raises(ConfigError, match="allowed: mappa compare RUN"):
        compare([])
    with pytest.raises(ConfigError, match="is no run folder, and there is none right in it"):
        compare([str(tmp_path / "nothing")])
    again = write_run(tmp_path / "again", seed=0, initial=1, selected=1)
    with pytest.raises(ConfigError, match=r"a0 and .*again are the same config with the same seed"):
        compare([str(runs[0]), str(again)])
    (again / "test.json").unlink()
    (again / "summary.json").write_text('{"status": "done", "selected_version": null}')
    with pytest.raises(ConfigError, match="has selected no weights"):
        compare([str(again)])
    (again / "summary.json").write_text('{"status": "preempted", "selected_version": 0}')
    with pytest.raises(ConfigError, match=r"again is not finished \(preempted\): finish it by resume="):
        compare([str(again)])
    (again / "summary.json").unlink()
    with pytest.raises(ConfigError, match=r"again is not finished \(under way\)"):
        compare([str(again)])
