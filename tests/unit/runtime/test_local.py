"""The local runtime with bare functions for Trainers: what the driver is asked for, and when it is not."""

from __future__ import annotations

import pytest

from lightning_mappa.algorithm.advantages import CreditSettings
from lightning_mappa.rollout.ledger import Ledger, RewardSettings
from lightning_mappa.runtime.board import DRIVER, Board
from lightning_mappa.runtime.local import run_threads
from lightning_mappa.runtime.served_weights import ServedWeights
from lightning_mappa.runtime.turn import Turn
from lightning_mappa.testing import ScriptedEngine, char_tokenizer

AGENTS = ("driver", "navigator", "reviewer")
"""The name of one is what one might call the thread that drives the run."""


def make_board(max_steps: int = 1) -> Board:
    ledger = Ledger(dict.fromkeys(AGENTS, True), CreditSettings(), RewardSettings())
    engine = ScriptedEngine(lambda request, prompt: "", char_tokenizer())
    turns = Turn((DRIVER, *AGENTS), deadline_s=10.0)
    weights = ServedWeights(engine, dict.fromkeys(AGENTS, 1e-3))
    return Board(ledger, weights, turns, first_step=0, max_steps=max_steps)


def run_to_the_first_boundary(body, folder, published):
    """Every agent saves a part before step 0, and then the run is over. Notes what was published."""
    board = make_board()

    def drive():
        while (job := board.next_job()) is not None:
            if job.kind == "publish":
                published.append(sorted(path.name for path in folder.iterdir()))
                board.post_published()
            else:
                board.end(-1, folder)

    run_threads(board, dict.fromkeys(AGENTS, body), drive)


def save(link):
    part = link.checkpoint_path(0)
    part.write_text("part")
    link.checkpoint_saved(0)


def test_a_joint_checkpoint_is_published_once_every_part_is_there(tmp_path):
    published = []
    run_to_the_first_boundary(save, tmp_path, published)
    assert published == [[f"{agent}.ckpt" for agent in AGENTS]]


@pytest.mark.parametrize("culprit", AGENTS)
def test_a_joint_checkpoint_is_not_published_when_one_agent_cannot_save(tmp_path, culprit):
    published = []

    def body(link):
        if link.agent_id == culprit:
            link.checkpoint_path(0).write_text("torn")
            raise OSError("disk full")
        save(link)

    with pytest.raises(OSError, match="disk full"):
        run_to_the_first_boundary(body, tmp_path, published)
    assert published == []
