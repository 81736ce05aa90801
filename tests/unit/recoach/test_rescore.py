"""New verdicts on recorded episodes, and how far they are from the old ones."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from lightning_mappa.algorithm.advantages import CreditSettings
from lightning_mappa.coaches.shuffled import ShuffledCoach
from lightning_mappa.coaches.watch import MissingWatch
from lightning_mappa.datamodules.transcript import RecordedSteps
from lightning_mappa.errors import CoachError
from lightning_mappa.recoach.figures import advantage_figures, correlations, verdict_figures
from lightning_mappa.recoach.rescore import advantages, recredited, rescored, verdicts_by_action
from lightning_mappa.recoach.update import Side, compare_updates, summed_gradient
from lightning_mappa.rollout.ledger import RewardSettings
from lightning_mappa.rollout.transcripts import read_episodes, read_transcript, step_path
from lightning_mappa.testing import ScriptedCoach, tiny_llama
from lightning_mappa.types import EpisodeStatus, MaskReason
from tests.unit.in_process import VOCAB, make_agent
from tests.unit.recoach.recorded import AGENTS, make_step, write_step

ACTION = CreditSettings()
TRAJECTORY = CreditSettings(return_scope="trajectory")


class Recorded:
    """A run folder of one step, and a coach that says again what stands there, changed by `change`."""

    def __init__(self, folder, settings=ACTION, n=24):
        write_step(folder, 0, make_step(n=n), settings)
        self.settings = settings
        self.steps = RecordedSteps(folder)
        self.episodes = read_episodes(step_path(folder, 0))
        self.verdicts = verdicts_by_action(self.episodes)
        self.keys = {agent: [key for key in self.verdicts if key[1] == AGENTS.index(agent)] for agent in AGENTS}

    def coach(self, change=lambda score: score):
        def say(episode, index):
            score = self.verdicts[episode.id, index].score
            return None if score is None else change(score)

        return ScriptedCoach(say)

    def again(self, coach, last_agent_id="verifier"):
        episodes = asyncio.run(rescored(coach, self.episodes, last_agent_id))
        return verdicts_by_action(episodes), {0: recredited(self.steps[0], episodes, RewardSettings())}


@pytest.fixture
def run(tmp_path):
    return Recorded(tmp_path)


def test_the_same_coach_twice_differs_in_nothing(run):
    verdicts, steps = run.again(run.coach())
    assert steps[0] == run.steps[0]
    for agent, keys in run.keys.items():
        found = verdict_figures(keys, run.verdicts, verdicts)
        assert (found["mean_difference"], found["largest"]) == (0, [])
        assert (found["pearson"], found["spearman"]) == pytest.approx((1, 1))
        missing = int(agent == "verifier")
        assert (found["n"], found["missing"]) == (24 - missing, {"recorded": missing, "new": missing})


def test_a_planted_bias_is_found(run):
    verdicts, steps = run.again(run.coach(lambda score: min(score + 1, 10)))
    found = verdict_figures(run.keys["solver"], run.verdicts, verdicts)
    capped = sum(run.verdicts[key].score == 10 for key in run.keys["solver"])
    assert found["mean_difference"] == pytest.approx(1 - capped / 24)
    below_ten = [key for key in run.keys["solver"] if run.verdicts[key].score < 10]
    unbounded = verdict_figures(below_ten, run.verdicts, verdicts)
    assert unbounded["mean_difference"] == 1
    assert unbounded["spearman"] == pytest.approx(1)
    # A bias moves no advantage of an agent but where it was cut off at the top.
    old, new = advantages(run.steps[0], ACTION), advantages(steps[0], ACTION)
    assert advantage_figures(run.keys["solver"], old, new)["pearson"] > 0.99


def test_the_largest_disagreements_come_first_with_both_reasons(run):
    first, second = run.keys["solver"][3], run.keys["solver"][5]
    off = {first: 9.0, second: -4.0}

    def say(episode, index):
        key = (episode.id, index)
        recorded = run.verdicts[key].score
        return recorded if key not in off or recorded is None else min(max(recorded + off[key], 0), 10)

    verdicts, _ = run.again(ScriptedCoach(say))
    largest = verdict_figures(run.keys["solver"], run.verdicts, verdicts)["largest"]
    moved = {key: verdicts[key].score - run.verdicts[key].score for key in off}
    expected = sorted((key for key in off if moved[key]), key=lambda key: -abs(moved[key]))
    assert [(entry["episode_id"], entry["index"]) for entry in largest] == expected
    assert largest[0]["reason_new"] == largest[0]["reason_recorded"] == "scripted"


def test_advantages_of_recorded_verdicts_are_those_of_the_transcript(tmp_path):
    run = Recorded(tmp_path, TRAJECTORY)
    recorded = {
        (line["episode_id"], line["index"]): line["advantage"] for line in read_transcript(step_path(tmp_path, 0))
    }
    assert advantages(run.steps[0], TRAJECTORY) == pytest.approx(recorded)
    assert recorded["train-0-000", 0] is None  # its return holds the missing verdict


def test_another_credit_mode_moves_advantages_and_no_verdict(run):
    old, new = advantages(run.steps[0], ACTION), advantages(run.steps[0], TRAJECTORY)
    solver, verifier = (advantage_figures(run.keys[agent], old, new) for agent in AGENTS)
    assert 0 < solver["pearson"] < 0.9
    assert solver["sign_flips"] > 0
    assert solver["masked"] == {"recorded": 0, "new": 1}
    assert verifier["pearson"] == pytest.approx(1)  # its actions are the last
    assert verifier["sign_flips"] == 0


@pytest.mark.parametrize("n_given", [0, 12, 40])
def test_too_many_lost_verdicts_end_it_from_whichever_on(run, n_given):
    asked = 0

    def say(episode, index):
        nonlocal asked
        asked += 1
        return 7.0 if asked <= n_given else None

    with pytest.raises(CoachError, match=rf"^5 of the last {min(n_given + 5, 20)} verdicts are missing"):
        asyncio.run(rescored(ScriptedCoach(say), run.episodes, "verifier", MissingWatch(0.2, 20)))
    asyncio.run(rescored(ScriptedCoach(say), run.episodes, "verifier"))  # without a watch


def test_what_is_under_way_is_booked_when_it_fails(run):
    halted = []

    class Halted(ScriptedCoach):
        async def halt(self, reason):
            halted.append(reason)

    def fail(episode, index):
        raise CoachError("spent")

    with pytest.raises(CoachError, match="spent"):
        asyncio.run(rescored(Halted(fail), run.episodes, "verifier"))
    assert halted == ["spent"]


def test_a_verdict_that_is_lost_masks_its_action_and_one_that_comes_frees_it(run):
    lost, found = ("train-0-002", 0), ("train-0-000", 1)

    def say(episode, index):
        key = (episode.id, index)
        return None if key == lost else 6.0 if key == found else run.verdicts[key].score

    _, steps = run.again(ScriptedCoach(say))
    row = {row.key: row for row in steps[0].rows}
    assert (row[lost].masked, row[lost].reward) == (MaskReason.MISSING_VERDICT, None)
    assert (row[found].masked, row[found].reward) == (None, 0.6)
    assert {e.key: e.score for e in steps[0].experiences}[found] == 6.0


def test_the_coach_is_shown_what_a_rollout_would_show_it(run):
    shown = []

    class Waits(ScriptedCoach):
        def needs_outcome_of(self, action, last_agent_id):
            return action.agent_id == last_agent_id

    def look(episode, index):
        shown.append((index, len(episode.actions), episode.status, episode.outcome))
        return 5.0

    run.again(Waits(look))
    assert set(shown) == {(0, 1, EpisodeStatus.RUNNING, None), (1, 2, EpisodeStatus.OK, 1.0)}


def test_a_coach_that_raises_is_missing_and_one_that_stops_the_run_stops(run):
    def breaks(episode, index):
        raise KeyError("score")

    verdicts, _ = run.again(ScriptedCoach(breaks))
    assert {verdict.score for verdict in verdicts.values()} == {None}
    assert "KeyError" in verdicts["train-0-001", 0].reason

    def stops(episode, index):
        raise CoachError("the budget is spent")

    with pytest.raises(CoachError, match="the budget is spent"):
        run.again(ScriptedCoach(stops))


def test_correlations_by_hand():
    assert correlations([1, 2, 3, 4], [1, 2, 3, 10]) == pytest.approx({"pearson": 14 / 250**0.5, "spearman": 1.0})
    assert correlations([1, 2, 3], [5, 5, 5]) == {"pearson": None, "spearman": None}
    assert correlations([1], [2]) == {"pearson": None, "spearman": None}


# -- the direction of the update -------------------------------------------------------------------------------------


def direction(run, steps, agent="solver", settings=None, **new_loss):
    model = tiny_llama(VOCAB, 0).double()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sides = []
    for its_steps, its_settings, loss in ((run.steps, run.settings, {}), (steps, settings or run.settings, new_loss)):
        module = make_agent(model, **{"mini_batch_size": 8, **loss})
        module.agent_id = agent
        sides.append(Side(module=module, steps=its_steps, settings=its_settings))
    found = compare_updates(*sides, accelerator="cpu", seed=0)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    return found


def test_the_same_verdicts_point_the_same_way(run):
    found = direction(run, run.again(run.coach())[1])
    assert found.cosine == pytest.approx(1, abs=1e-9)
    assert found.norm_recorded == pytest.approx(found.norm_new)
    assert found.norm_recorded > 0


def test_the_contrary_verdicts_point_the_other_way(run):
    assert direction(run, run.again(run.coach(lambda score: 10 - score))[1]).cosine == pytest.approx(-1, abs=1e-9)


def test_shuffled_verdicts_point_nowhere(tmp_path):
    run = Recorded(tmp_path, n=160)
    shuffled = direction(run, run.again(ShuffledCoach(run.coach(), seed=1))[1])
    rng = random.Random(0)
    drawn = direction(run, run.again(ScriptedCoach(lambda episode, index: float(rng.randrange(11))))[1])
    assert abs(shuffled.cosine) < 0.3
    assert abs(drawn.cosine) < 0.3


def test_another_credit_mode_turns_the_update(run):
    same = {0: run.steps[0]}
    assert 0 < direction(run, same, settings=TRAJECTORY).cosine < 0.95
    assert direction(run, same, agent="verifier", settings=TRAJECTORY).cosine == pytest.approx(1, abs=1e-9)


def test_another_loss_is_that_of_the_new_side_alone(run):
    """All responses have 3 tokens: a sum over tokens is 3 times their mean, and one mini-batch of all 24 actions is a
    third of three of 8."""
    same = {0: run.steps[0]}
    plain = direction(run, same)
    summed = direction(run, same, loss_agg_mode="seq-mean-token-sum")
    assert summed.norm_recorded == pytest.approx(plain.norm_recorded)
    assert summed.norm_new == pytest.approx(3 * plain.norm_new)
    assert summed.cosine == pytest.approx(1, abs=1e-9)
    whole = direction(run, same, mini_batch_size=24)
    assert whole.norm_recorded == pytest.approx(plain.norm_recorded)
    assert whole.norm_new == pytest.approx(plain.norm_new / 3)


def test_a_constant_coach_gives_no_direction(run):
    found = direction(run, run.again(run.coach(lambda score: 7.0))[1])
    assert (found.cosine, found.norm_new) == (None, 0.0)
    assert found.norm_recorded > 0


def test_the_gradient_is_that_of_the_loss_by_hand(run):
    """One mini-batch of all actions: the gradient of −mean over tokens of advantage · log-prob."""
    model = tiny_llama(VOCAB, 0).double()
    module = make_agent(model, mini_batch_size=64)
    kept = summed_gradient(module, run.steps, ACTION, accelerator="cpu", seed=0)
    given = advantages(run.steps[0], ACTION)
    mine = [e for e in run.steps[0].experiences if e.agent_id == "solver"]
    model.zero_grad()
    total = 0.0
    for e in mine:
        ids = torch.tensor([e.prompt_ids + e.response_ids])
        log_probs = model(input_ids=ids).logits.log_softmax(-1)[0, len(e.prompt_ids) - 1 : -1]
        total = total - given[e.key] * log_probs.gather(1, torch.tensor(e.response_ids)[:, None]).sum()
    (total / (3 * len(mine))).backward()
    for name, gradient in kept.items():
        expected = dict(module.named_parameters())[name].grad
        assert torch.allclose(gradient, expected, atol=1e-9), name
    assert len(kept) == len([p for p in module.parameters() if p.grad is not None])
