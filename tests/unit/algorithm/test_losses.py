"""The clipped loss token by token, and its mean however the mini-batch is cut."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_mappa.algorithm.choices import ALGORITHM_OPTIONS, check_option
from lightning_mappa.algorithm.losses import (
    aggregate,
    check_clipping,
    clipped_surrogate,
    correction_weights,
    loss_denominator,
)
from lightning_mappa.errors import ConfigError, NotAvailableError

LOSS_AGG_MODES, _ = ALGORITHM_OPTIONS["algorithm.loss_agg_mode"]


def loss_and_gradient(log_ratio, advantage, *, low=0.2, high=0.2, dual_clip=None, dtype=torch.float64):
    log_probs = torch.tensor([log_ratio], dtype=dtype, requires_grad=True)
    loss, clipped = clipped_surrogate(
        log_probs,
        torch.zeros(1, dtype=dtype),
        torch.tensor([advantage], dtype=dtype),
        clip_ratio_low=low,
        clip_ratio_high=high,
        dual_clip=dual_clip,
    )
    loss.sum().backward()
    return loss.item(), log_probs.grad.item(), bool(clipped)


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "gradient", "clipped"),
    [
        (1.0, 0.5, -0.5, -0.5, False),
        (1.0, 1.1, -1.1, -1.1, False),
        (1.0, 1.5, -1.3, 0.0, True),
        (-1.0, 0.5, 0.9, 0.0, True),
        (-1.0, 1.1, 1.1, 1.1, False),
        (-1.0, 1.5, 1.5, 1.5, False),
    ],
)
def test_truth_table_with_unequal_clips(advantage, ratio, loss, gradient, clipped):
    made = loss_and_gradient(math.log(ratio), advantage, low=0.1, high=0.3)
    assert made == (pytest.approx(loss), pytest.approx(gradient), clipped)


def test_gradient_at_ratio_one_is_the_policy_gradient():
    assert loss_and_gradient(0.0, 2.5) == (-2.5, -2.5, False)
    assert loss_and_gradient(0.0, -2.5) == (2.5, 2.5, False)


@pytest.mark.parametrize("log_ratio", [95.0, 1000.0])
def test_a_large_log_ratio_overflows_neither_loss_nor_gradient(log_ratio):
    loss, gradient, _ = loss_and_gradient(log_ratio, -1.0, dtype=torch.float32)
    assert loss == pytest.approx(math.exp(20), rel=1e-5)
    assert gradient == 0.0
    assert loss_and_gradient(-log_ratio, 1.0, dtype=torch.float32)[0] == pytest.approx(-math.exp(-20))


def test_dual_clip_bounds_a_negative_advantage_only():
    assert loss_and_gradient(10.0, -1.0, dual_clip=3.0) == (3.0, 0.0, True)
    assert loss_and_gradient(math.log(2.0), -1.0, dual_clip=3.0) == (
        pytest.approx(2.0),
        pytest.approx(2.0),
        False,
    )
    assert loss_and_gradient(10.0, 1.0, dual_clip=3.0) == (pytest.approx(-1.2), 0.0, True)


def test_correction_weights_are_capped_and_detached():
    rollout = torch.zeros(4, dtype=torch.float64)
    old = torch.tensor([0.1, 4.0, 0.0, 1000.0], dtype=torch.float64, requires_grad=True)
    weights = correction_weights(old, rollout, 2.0)
    assert weights.tolist() == pytest.approx([1.10517, 2.0, 1.0, 2.0], abs=1e-5)
    assert not weights.requires_grad
    assert correction_weights(-old, rollout, 2.0)[0].item() == pytest.approx(math.exp(-0.1))


def whole(values, mask, mode="token-mean"):
    values_BT = torch.tensor(values, dtype=torch.float64)
    mask_BT = torch.tensor(mask, dtype=torch.bool)
    return aggregate(values_BT, mask_BT, mode, denominator=loss_denominator(mask_BT, mode)).item()


def test_mean_is_over_unmasked_tokens():
    assert whole([[1, 2, 0, 0], [3, 0, 0, 0]], [[1, 1, 0, 0], [1, 0, 0, 0]]) == 2.0


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_infinite_loss_outside_the_mask_does_not_count(mode):
    loss_BT = torch.tensor([[math.inf, 1.0], [math.nan, math.nan]], requires_grad=True)
    mask_BT = torch.tensor([[False, True], [False, False]])
    loss = aggregate(loss_BT, mask_BT, mode, denominator=loss_denominator(mask_BT, mode))
    loss.backward()
    assert loss.item() == 1.0
    assert loss_BT.grad.tolist() == [[0.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_batch_without_an_unmasked_token_is_zero_and_stays_in_the_graph(mode):
    loss_BT = torch.ones(2, 3, requires_grad=True)
    mask_BT = torch.zeros(2, 3, dtype=torch.bool)
    assert loss_denominator(mask_BT, mode) == 0
    loss = aggregate(loss_BT, mask_BT, mode, denominator=0)
    loss.backward()
    assert loss.item() == 0.0
    assert loss_BT.grad.tolist() == [[0.0] * 3] * 2


def lengths_mask(lengths):
    return torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize(
    ("mode", "short", "long"),
    [
        ("token-mean", 0.1, 0.1),
        ("seq-mean-token-mean", 0.25, 0.0625),
        ("seq-mean-token-sum", 0.5, 0.5),
    ],
)
def test_weight_of_a_token_in_a_short_and_a_long_sequence(mode, short, long):
    mask_BT = lengths_mask([2, 8])
    loss_BT = torch.zeros(2, 8, dtype=torch.float64, requires_grad=True)
    aggregate(loss_BT, mask_BT, mode, denominator=loss_denominator(mask_BT, mode)).backward()
    assert loss_BT.grad[0, :3].tolist() == [short, short, 0.0]
    assert loss_BT.grad[1].tolist() == [long] * 8


def test_ranks_with_unequal_token_counts_weigh_each_token_the_same():
    masks = [lengths_mask([2]), lengths_mask([8])]
    denominator = sum(loss_denominator(mask_BT, "token-mean") for mask_BT in masks)
    grads = []
    for mask_BT in masks:
        loss_BT = torch.zeros(mask_BT.shape, dtype=torch.float64, requires_grad=True)
        # each rank's loss times the world size, averaged over the two ranks
        (2 * aggregate(loss_BT, mask_BT, "token-mean", denominator=denominator) / 2).backward()
        grads += loss_BT.grad.flatten().tolist()
    assert grads == pytest.approx([0.1] * 10)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_masked_truncated_sequence_leaves_gradient_and_denominator(mode):
    loss_BT = torch.tensor([[1.0, 3.0], [100.0, 100.0]], dtype=torch.float64, requires_grad=True)
    mask_BT = torch.tensor([[True, True], [False, False]])
    both = aggregate(loss_BT, mask_BT, mode, denominator=loss_denominator(mask_BT, mode))
    both.backward()
    alone = aggregate(loss_BT[:1], mask_BT[:1], mode, denominator=loss_denominator(mask_BT[:1], mode))
    assert both.item() == alone.item()
    assert loss_BT.grad[1].tolist() == [0.0, 0.0]
    assert loss_denominator(mask_BT, mode) < loss_denominator(torch.ones_like(mask_BT), mode)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.sampled_from(LOSS_AGG_MODES),
    st.data(),
)
def test_cutting_into_micro_batches_changes_neither_loss_nor_gradient(lengths, mode, data):
    count, width = len(lengths), max([*lengths, 1])
    cuts = data.draw(st.lists(st.integers(0, count), max_size=4).map(sorted))
    generator = torch.Generator().manual_seed(count * 1000 + width)
    log_probs_BT, old_BT, rollout_BT, advantages_BT = torch.randn(
        4, count, width, generator=generator, dtype=torch.float64
    )
    mask_BT = torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]
    denominator = loss_denominator(mask_BT, mode)

    def run(bounds):
        leaf_BT = log_probs_BT.clone().requires_grad_()
        losses = []
        for start, stop in bounds:
            rows = slice(start, stop)
            loss_BT, _ = clipped_surrogate(
                leaf_BT[rows], old_BT[rows], advantages_BT[rows], clip_ratio_low=0.2, clip_ratio_high=0.2
            )
            loss_BT = loss_BT * correction_weights(old_BT[rows], rollout_BT[rows], 2.0)
            losses.append(aggregate(loss_BT, mask_BT[rows], mode, denominator=denominator))
            losses[-1].backward()
        return sum(losses).item(), leaf_BT.grad

    loss, grad_BT = run([(0, count)])
    edges = [0, *cuts, count]
    cut_loss, cut_grad_BT = run(pairwise(edges))
    assert cut_loss == pytest.approx(loss, abs=1e-12)
    torch.testing.assert_close(cut_grad_BT, grad_BT, rtol=0.0, atol=1e-12)
    assert not grad_BT[~mask_BT].any()


def test_option_names():
    check_option("algorithm.policy_loss", "ppo")
    for name in ("gspo", "cispo"):
        with pytest.raises(NotAvailableError, match=f"algorithm.policy_loss={name} is not available"):
            check_option("algorithm.policy_loss", name)
    with pytest.raises(ConfigError, match=r"algorithm.policy_loss is 'vpg'; allowed: ppo"):
        check_option("algorithm.policy_loss", "vpg")
    with pytest.raises(ConfigError, match=r"algorithm.loss_agg_mode is 'sum'; allowed: token-mean, seq-mean"):
        loss_denominator(torch.ones(1, 1, dtype=torch.bool), "sum")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("clip_ratio_low", 1.0),
        ("clip_ratio_low", -0.1),
        ("clip_ratio_high", -0.1),
        ("clip_ratio_high", math.nan),
        ("dual_clip", 1.0),
    ],
)
def test_clip_bounds(key, value):
    check_clipping(clip_ratio_low=0.2, clip_ratio_high=0.28, dual_clip=3.0)
    check_clipping(clip_ratio_low=0.0, clip_ratio_high=0.0, dual_clip=None)
    with pytest.raises(ConfigError, match=f"algorithm.{key} is {value}; allowed"):
        check_clipping(**{"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "dual_clip": None, key: value})
