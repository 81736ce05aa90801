"""An agent on two ranks in actors: it trains, goes on after a rank's death, and says who died."""

from __future__ import annotations

import signal

import pytest
import ray
import torch

from tests.integration.conftest import exported, run_fit
from tests.integration.test_ray import ONE_TRAINED, PROBES, RAY, untimed_lines
from tests.packages import needs

pytestmark = [pytest.mark.slow, needs("deepspeed"), pytest.mark.timeout(600)]
TWO_RANKS = ("agents.solver.strategy=zero3", "agents.solver.devices=2")


@pytest.fixture(autouse=True)
def no_ray_left():
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zero") / "run"
    run_fit(folder, *ONE_TRAINED, *RAY, *TWO_RANKS)
    return folder


def test_two_ranks_train_what_one_does(tmp_path, undisturbed):
    run_fit(tmp_path / "one", *ONE_TRAINED)
    assert untimed_lines(tmp_path / "one", "selection-000000.jsonl") == untimed_lines(
        undisturbed, "selection-000000.jsonl"
    )
    one, two = (exported(folder, "solver") for folder in (tmp_path / "one", undisturbed))
    gap = sum(float((one[name] - two[name]).square().sum()) for name in one) ** 0.5
    size = sum(float(one[name].square().sum()) for name in one) ** 0.5
    assert gap / size < 1e-5


@pytest.mark.parametrize("rank", [0, 1])
def test_after_the_death_of_a_rank_both_go_on_from_the_last_checkpoint(tmp_path, undisturbed, rank):
    probe = (
        f"+callbacks.fault._target_={PROBES}.SignalOnce",
        f"+callbacks.fault.number={int(signal.SIGKILL)}",
        f"+callbacks.fault.marker={tmp_path / 'marker'}",
        f"+callbacks.fault.rank={rank}",
    )
    with pytest.warns(UserWarning, match=f"rank {rank} of agent solver .*goes on from its last joint checkpoint"):
        summary = run_fit(tmp_path / "run", *ONE_TRAINED, *RAY, *TWO_RANKS, *probe)
    assert (summary["status"], summary["resources"]["restarts"]) == ("done", 1)
    mended, whole = exported(tmp_path / "run", "solver"), exported(undisturbed, "solver")
    assert all(torch.equal(mended[name], whole[name]) for name in whole)
