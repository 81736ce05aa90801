"""Two processes over gloo, and one run behind the first."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_mappa.runtime.rank_link import RankLink
from lightning_mappa.testing import tiny_llama
from tests.unit.in_process import VOCAB

ROOT = Path(__file__).parents[3]
LIMIT_S = 120


@pytest.fixture(scope="module")
def notes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.unit.runtime.rank_link_program", str(rank), str(port), str(folder)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        assert [rank.wait(timeout=LIMIT_S) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_every_rank_is_told_what_the_run_told_rank_0(notes):
    first, second = (note["said"] for note in notes)
    assert first[:5] == second[:5]
    assert first[6:] == second[6:]
    assert "Experience(key=('episode-0-0', 0)" in second[1]
    assert "ActionCredit(masked=<MaskReason.INVALID" in second[2]
    assert second[6] == "{'success': 0.5}"
    assert "solver.ckpt" in second[7]


def test_weights_that_go_straight_to_engines_are_sent_by_every_rank_and_offered_by_one(notes):
    first, second = notes
    assert [engines for engines, _ in first["direct"]] == [["engine of 4"], ["engine of 5"]]
    assert [engines for engines, _ in second["direct"]] == [[], []]
    assert [total for _, total in first["direct"]] == [total for _, total in second["direct"]]
    assert (first["sent"], second["sent"]) == ([["weights_sent, 7", 4], ["weights_sent, 7", 5]], [])
    assert first["said"][10] == second["said"][10] == "InfrastructureError: the engine serves others"


def test_errors_of_the_run_reach_every_rank(notes):
    first, second = (note["said"] for note in notes)
    assert second[4] == "InfrastructureError: the engine is gone"
    assert first[5] == "ZeroDivisionError: by nothing"
    assert second[5] == "InfrastructureError: ZeroDivisionError: by nothing"
    assert second[9] == "RunEnded: the run is over"


def test_every_rank_reads_all_tensors_also_where_the_run_takes_few_or_none(notes):
    """Each is a collective: a rank that stopped reading would leave the others waiting."""
    n_tensors = len(list(tiny_llama(VOCAB, 0).parameters()))
    for note in notes:
        assert note["read"] == {"1": n_tensors, "2": n_tensors, "3": n_tensors}
    assert notes[0]["right"]


def test_only_rank_0_speaks_to_the_run(notes):
    assert [note["left"] for note in notes] == [1, 0]
    with pytest.raises(ValueError, match="rank 0 alone"):
        RankLink(None, rank=0, agent_id="solver", first_step=0, max_steps=1, timeout_s=1.0)
