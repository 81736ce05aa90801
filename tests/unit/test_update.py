"""One optimizer step over several ranks, which are threads here and add up through a barrier."""

from __future__ import annotations

import copy
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lightning_mappa.datamodules.collate import collate
from lightning_mappa.microbatch import ForwardSize, forward_in_pieces
from lightning_mappa.policy import TokenLogProbs
from lightning_mappa.policy_loss import PolicyLoss
from lightning_mappa.ranks import Ranks
from lightning_mappa.testing import tiny_llama
from lightning_mappa.update import PolicyUpdate
from tests.unit.factories import make_experience

VOCAB = 24
WAIT_S = 60


class Gradients:
    """An `OptimizerStep` that averages over ranks as DeepSpeed does, and steps nothing."""

    def __init__(self, policy, ranks, calls):
        self._policy, self._ranks, self._calls = policy, ranks, calls

    def backward(self, loss, *, last):
        self._calls.append(last)
        loss.backward()

    def take(self):
        for parameter in self._policy.parameters():
            parameter.grad = self._ranks.total(parameter.grad) / self._ranks.size
        return float(torch.cat([p.grad.flatten() for p in self._policy.parameters()]).norm())


def in_ranks(size, work):
    """`work` of every rank, each in a thread, with a `Ranks` whose sums are real."""
    barrier = threading.Barrier(size, timeout=WAIT_S)
    posted: list[torch.Tensor | None] = [None] * size

    def ranks(rank):
        def total(tensor):
            posted[rank] = tensor.clone()
            barrier.wait()
            result = torch.stack(posted).sum(0)
            barrier.wait()
            return result

        return Ranks(rank=rank, size=size, total=total)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(ranks(rank)), range(size)))


def make_batch(n_rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(n_rows):
        ids = torch.randint(0, VOCAB, (1 + number % 5,), generator=generator).tolist()
        rows.append(make_experience(key=(f"e{number}", 0), prompt_ids=(1, 2), response_ids=tuple(ids)))
    return collate(rows, step=0)


def step(policy, batch, ranks, *, micro_batch_size=1, spoil=lambda log_probs: log_probs):
    """The update on a mini-batch with made-up advantages; gradients stay in the policy."""
    calls: list[bool] = []
    size = ForwardSize(sequences=micro_batch_size)
    batch.old_log_probs_BT = forward_in_pieces(policy, batch, size, ranks, dtype=torch.float64).log_probs_BT
    batch.advantages_BT = torch.linspace(-1, 1, len(batch)).double()[:, None] * batch.response_mask_BT
    loss = PolicyLoss(
        name="ppo",
        loss_agg_mode="token-mean",
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        dual_clip=None,
        rollout_correction=None,
    )

    def spoiled(*args, **kwargs):
        result = policy(*args, **kwargs)
        return result._replace(log_probs_BT=spoil(result.log_probs_BT))

    update = PolicyUpdate(
        policy=spoiled,
        model=policy.model,
        loss=loss,
        size=size,
        ranks=ranks,
        begin=lambda: Gradients(policy, ranks, calls),
    )
    return update(batch), torch.cat([p.grad.flatten() for p in policy.parameters()]), calls


@pytest.mark.parametrize(("n_ranks", "n_rows"), [(2, 7), (2, 1), (4, 5), (4, 2)])
def test_ranks_give_the_gradient_of_one_process_also_where_some_have_no_sample(n_ranks, n_rows):
    """Powers of two as numbers of ranks: the model's norms work in float32, where only they scale without rounding."""
    policy = TokenLogProbs(tiny_llama(VOCAB, 0).double())
    alone, gradient, _ = step(copy.deepcopy(policy), make_batch(max(n_rows, 2)).select(range(n_rows)), Ranks())
    copies = [copy.deepcopy(policy) for _ in range(n_ranks)]
    results = in_ranks(
        n_ranks, lambda ranks: step(copies[ranks.rank], make_batch(max(n_rows, 2)).select(range(n_rows)), ranks)
    )
    for update, own, calls in results:
        assert (own - gradient).norm() / gradient.norm() <= 1e-10
        assert update.status == alone.status == "stepped"
        assert update.loss == pytest.approx(alone.loss, rel=1e-9)
        assert update.grad_norm == pytest.approx(alone.grad_norm, rel=1e-9)
        assert (update.n_tokens, update.n_actions, update.n_clipped) == (
            alone.n_tokens,
            alone.n_actions,
            alone.n_clipped,
        )
        assert calls == [*[False] * (len(calls) - 1), True]
    assert len({len(calls) for _, _, calls in results}) == 1  # as many backward passes on every rank


def test_a_loss_that_is_no_number_on_one_rank_stops_the_step_on_all():
    """Also in its last but one micro-batch, and where the gradient alone would not tell."""
    policy = TokenLogProbs(tiny_llama(VOCAB, 0).double())
    copies = [copy.deepcopy(policy) for _ in range(2)]

    def work(ranks):
        seen: list[int] = []

        def spoil(log_probs_BT):
            seen.append(0)
            # A constant that is added has no gradient of its own.
            wrong = ranks.rank == 1 and len(seen) == 1
            return log_probs_BT + torch.full_like(log_probs_BT, math.inf if wrong else 0.0).nan_to_num(posinf=math.nan)

        return step(copies[ranks.rank], make_batch(6), ranks, spoil=spoil)

    assert [update.status for update, _, _ in in_ranks(2, work)] == ["skipped", "skipped"]
