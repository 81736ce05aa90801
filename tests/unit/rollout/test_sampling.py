import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mappa.rollout.sampling import nucleus, sample, uniforms

LOGITS = torch.tensor([[2.0, 1.0, 0.0]])


def draw(logits_BV, u, temperature=1.0, top_p=1.0):
    rows = logits_BV.shape[0]
    return sample(
        logits_BV,
        torch.as_tensor(u, dtype=torch.float64).expand(rows),
        torch.full((rows,), temperature),
        torch.full((rows,), top_p, dtype=torch.float64),
    )


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, -0.40761), (0.7, -0.26012), (0.0, -0.40761)])
def test_log_prob_is_that_of_the_sampling_distribution(temperature, expected):
    ids, log_probs = draw(LOGITS, 0.0, temperature)
    assert ids.tolist() == [0]
    assert log_probs.item() == pytest.approx(expected, abs=1e-5)
    assert log_probs.dtype == torch.float32


@pytest.mark.parametrize(("u", "expected"), [(0.0, 0), (0.66, 0), (0.67, 1), (0.90, 1), (0.92, 2), (1 - 2**-53, 2)])
def test_a_uniform_number_picks_its_place_in_the_cumulative_distribution(u, expected):
    # probabilities .6652, .2447, .0900: cumulative .6652, .9100, 1
    assert draw(LOGITS, u)[0].item() == expected


def test_greedy_takes_the_likeliest_whatever_the_random_number():
    assert draw(torch.tensor([[0.0, 3.0, 1.0]]), 0.999, temperature=0.0)[0].item() == 1


@given(st.floats(0, 1, exclude_max=True), st.integers(0, 4))
@settings(max_examples=100, deadline=None)
def test_a_token_without_probability_is_never_drawn(u, last):
    logits = torch.full((1, 6), -math.inf)
    logits[0, : last + 1] = torch.linspace(-3, 3, last + 1)
    assert draw(logits, u)[0].item() <= last


@given(st.integers(0, 2**32), st.floats(0.05, 1.0))
@settings(max_examples=50, deadline=None)
def test_nucleus_is_the_smallest_likely_set(seed, top_p):
    probs = torch.rand(3, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    probs = probs / probs.sum(-1, keepdim=True)
    kept = nucleus(probs, torch.full((3,), top_p, dtype=torch.float64))
    for before, after in zip(probs, kept, strict=True):
        inside = before[after > 0]
        assert inside.sum() >= top_p - 1e-12
        assert inside.sum() - inside.min() < top_p
        assert not (before[after == 0] > inside.min()).any()


def test_top_p_cuts_the_tail():
    assert draw(LOGITS, 0.999, top_p=0.7)[0].item() == 1
    assert draw(LOGITS, 0.999, top_p=0.6)[0].item() == 0


def test_draws_follow_the_distribution():
    logits = LOGITS.expand(20_000, 3)
    u = uniforms(0, 20_000)
    ids, _ = sample(logits, u, torch.ones(20_000), torch.ones(20_000, dtype=torch.float64))
    share = torch.bincount(ids, minlength=3) / 20_000
    assert torch.allclose(share, LOGITS[0].softmax(-1), atol=0.015)


def test_non_finite_logits_show_in_the_log_prob():
    assert draw(torch.tensor([[math.nan, 0.0]]), 0.3)[1].isnan().all()


def test_uniforms_repeat_with_the_seed_and_leave_the_global_state_alone():
    state = torch.get_rng_state()
    assert torch.equal(uniforms(5, 4), uniforms(5, 4))
    assert not torch.equal(uniforms(5, 4), uniforms(6, 4))
    assert torch.equal(uniforms(5, 8)[:4], uniforms(5, 4))
    assert torch.equal(state, torch.get_rng_state())
