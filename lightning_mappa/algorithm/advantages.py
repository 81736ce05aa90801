"""From rewards and KL sums to advantages: returns, baseline and normalisation over the whole batch.

    ranks: action_stats ─▶ credit (all agents, episode order, float64) ─▶ ranks: token_advantages

What crosses between agents is four numbers per action, because agents share no process group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby, pairwise

import torch
from torch import Tensor

from lightning_mappa.algorithm.choices import check_option
from lightning_mappa.algorithm.moments import Term, mean_and_std, total
from lightning_mappa.errors import NotAvailableError
from lightning_mappa.types import ActionKey, MaskReason

_EPS = 1e-8
_CONSTANT_STD = 1e-6
"""Rewards, whose range is 1, that differ by less carry no signal: scaling them up would scale rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditSettings:
    """How actions are credited.

    Raises `ConfigError` for an unknown value, `NotAvailableError` for a documented one that is not built.
    """

    adv_estimator: str = "reinforce_plus_plus"
    return_scope: str = "action"
    """Whose rewards from action k on make up G_k: everybody's, the same agent's, or only the action's own. Those who
    share weights are one agent, here and in `norm_scope`."""
    return_level: str = "action"
    """`token`: within an action, a token is charged only for the KL from itself on."""
    return_agg: str = "sum"
    """`mean` divides a return by the number of actions in it."""
    baseline: str = "none"
    """`agent_turn` subtracts the batch mean of G over actions of the same agent and turn: a place in the episode, so
    those who share weights have places of their own."""
    norm_scope: str = "agent"
    norm_unit: str = "action"
    """What counts once in mean and std."""
    gamma: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "gamma":
                check_option(f"algorithm.{field.name}", getattr(self, field.name))
        if self.gamma != 1.0:
            raise NotAvailableError(f"algorithm.gamma={self.gamma} is not available; allowed: 1.0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionStats:
    """What a rank knows of one action, float64; s_t = sum of kl_u for u >= t within the action."""

    n_tokens: int
    kl_sum: float = 0.0
    suffix_kl_sum: float = 0.0
    """sum over t of s_t"""
    suffix_kl_sq_sum: float = 0.0
    """sum over t of s_t squared"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionRow:
    """One action of the step's batch, in episode order, as `credit` reads it."""

    key: ActionKey
    agent_id: str
    """Whose weights it trains."""
    turn: int
    reward: float | None
    """0…1 after `rewards`, None when unknown."""
    masked: MaskReason | None
    frozen: bool
    kl_coef: float
    stats: ActionStats
    acted_as: str = ""
    """Who of those that share the agent's weights acted; empty: they are one agent's alone."""

    @property
    def place(self) -> tuple[str, str, int]:
        """Whose turn it was, and which: the same in every episode."""
        return self.agent_id, self.acted_as, self.turn


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionCredit:
    """Enough to write down the advantage of every token: see `token_advantages`."""

    masked: MaskReason | None
    offset: float
    """G_k less its baseline (return_level=action), or that plus kl_scale · beta · kl_sum (token)."""
    token_level: bool
    mean: float
    std: float
    degenerate: bool
    """The rewards of the normalisation scope are constant: the advantage is 0."""
    kl_scale: float = 1.0
    """Share of beta · s_t in the return: 1, or 1 / number of actions in scope (return_agg=mean)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Return:
    """A trained agent's action with its return-to-go."""

    row: ActionRow
    masked: MaskReason | None
    value: float
    """G_k, later less its baseline; 0 when masked."""
    kl_scale: float

    @property
    def kl_coef(self) -> float:
        return self.row.kl_coef * self.kl_scale

    def offset(self, *, token_level: bool) -> float:
        return self.value + self.kl_coef * self.row.stats.kl_sum if token_level else self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moments:
    mean: float = 0.0
    std: float = 0.0
    degenerate: bool = False


def credit(
    rows: Sequence[ActionRow], settings: CreditSettings, *, cut_episodes: Collection[str] = ()
) -> dict[ActionKey, ActionCredit]:
    """The credit of every action of the trained agents, in the order of `rows`.

    rows: the whole batch of a step, over all agents and ranks; each episode's actions together and in order.
    Frozen agents' rows are in the returns of others, without KL, and in no statistic.
    cut_episodes: ids of those that infrastructure ended; a verdict is missing after their last action.

    A reward of None masks its own action (`missing_verdict`) and every earlier one whose return would
    contain it (`return_unknown`); an action masked for another reason keeps its reward in earlier returns.
    Raises `ValueError` when an episode is in pieces or out of order.
    """
    returns = _returns(rows, settings.return_scope, settings.return_agg, cut_episodes)
    if settings.baseline == "agent_turn":
        returns = _less_agent_turn_mean(returns)
    scopes: dict[str, list[_Return]] = defaultdict(list)
    for item in returns:
        scopes[_scope_name(item, settings)].append(item)
    moments = {name: _moments(items, settings) for name, items in scopes.items()}
    token_level = settings.return_level == "token"
    result = {}
    for item in returns:
        scope = moments[_scope_name(item, settings)]
        result[item.row.key] = ActionCredit(
            masked=item.masked,
            offset=0.0 if item.masked else item.offset(token_level=token_level),
            token_level=token_level,
            mean=scope.mean,
            std=scope.std,
            degenerate=scope.degenerate,
            kl_scale=item.kl_scale,
        )
    return result


def token_advantages(credit: ActionCredit, suffix_kl_T: Tensor, kl_coef: float) -> Tensor:
    """float64 [T], one per response token of one action; 0 when it is masked or its scope degenerate.

    suffix_kl_T: s_t of `suffix_kl`; kl_coef: the beta that the action's row carried.
    """
    if credit.masked or credit.degenerate:
        return torch.zeros_like(suffix_kl_T, dtype=torch.float64)
    charged = kl_coef * credit.kl_scale if credit.token_level else 0.0
    return_T = credit.offset - charged * suffix_kl_T.double()
    return (return_T - credit.mean) / (credit.std + _EPS)


def action_advantage(credit: ActionCredit, kl_sum: float, kl_coef: float) -> float:
    """That of the action as a whole, which is its first token's: one number for transcripts and metrics."""
    return float(token_advantages(credit, torch.tensor([kl_sum], dtype=torch.float64), kl_coef))


def suffix_kl(kl_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """float64 [B, T]: s_t, the KL from token t to the end of its row over the mask; 0 outside the mask."""
    inside_BT = torch.where(mask_BT, kl_BT.double(), 0.0)
    return torch.where(mask_BT, inside_BT.flip(1).cumsum(1).flip(1), 0.0)


def action_stats(kl_BT: Tensor, response_mask_BT: Tensor) -> list[ActionStats]:
    """One per row, in order. kl_BT: k1 per token, read only inside the mask."""
    suffix_BT = suffix_kl(kl_BT, response_mask_BT)
    columns = (
        response_mask_BT.sum(1),
        torch.where(response_mask_BT, kl_BT.double(), 0.0).sum(1),
        suffix_BT.sum(1),
        suffix_BT.square().sum(1),
    )
    return [
        ActionStats(n_tokens=n, kl_sum=kl, suffix_kl_sum=suffix, suffix_kl_sq_sum=square)
        for n, kl, suffix, square in zip(*(column.tolist() for column in columns), strict=True)
    ]


def _returns(rows: Sequence[ActionRow], scope: str, agg: str, cut_episodes: Collection[str]) -> list[_Return]:
    returns: list[_Return] = []
    seen: set[str] = set()
    for episode_id, group in groupby(rows, key=lambda row: row.key[0]):
        actions = list(group)
        indices = [row.key[1] for row in actions]
        if episode_id in seen or any(a >= b for a, b in pairwise(indices)):
            raise ValueError(f"episode {episode_id}: its actions are not together and in order")
        seen.add(episode_id)
        cut = episode_id in cut_episodes and scope != "action"
        for k, row in enumerate(actions):
            if not row.frozen:
                later = [other for other in actions[k + 1 :] if _contains(scope, row, other)]
                returns.append(_return(row, later, agg, cut=cut))
    return returns


def _contains(scope: str, row: ActionRow, later: ActionRow) -> bool:
    return scope == "trajectory" or (scope == "agent" and row.agent_id == later.agent_id)


def _return(row: ActionRow, later: Sequence[ActionRow], agg: str, *, cut: bool) -> _Return:
    masked = row.masked
    if masked is None and row.reward is None:
        masked = MaskReason.MISSING_VERDICT
    rewards = [_penalised(other) for other in (row, *later)]
    known = [reward for reward in rewards if reward is not None]
    if masked is None and (cut or len(known) < len(rewards)):
        masked = MaskReason.RETURN_UNKNOWN
    scale = 1.0 / len(rewards) if agg == "mean" else 1.0
    return _Return(row=row, masked=masked, value=0.0 if masked else scale * total(known), kl_scale=scale)


def _penalised(row: ActionRow) -> float | None:
    """r_j, the reward less beta times the KL of the action; the frozen have no KL."""
    if row.reward is None or row.frozen:
        return row.reward
    return row.reward - row.kl_coef * row.stats.kl_sum


def _less_agent_turn_mean(returns: Sequence[_Return]) -> list[_Return]:
    groups: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for item in returns:
        if item.masked is None:
            groups[item.row.place].append(item.value)
    means = {place: total(values) / len(values) for place, values in groups.items()}
    return [item if item.masked else replace(item, value=item.value - means[item.row.place]) for item in returns]


def _scope_name(item: _Return, settings: CreditSettings) -> str:
    return item.row.agent_id if settings.norm_scope == "agent" else ""


def _moments(items: Sequence[_Return], settings: CreditSettings) -> _Moments:
    known = [item for item in items if item.masked is None]
    if not known:
        return _Moments()
    mean, std = mean_and_std([_term(item, settings) for item in known])
    _, spread = mean_and_std([Term(offset=item.row.reward) for item in known if item.row.reward is not None])
    return _Moments(mean=mean, std=std, degenerate=spread < _CONSTANT_STD)


def _term(item: _Return, settings: CreditSettings) -> Term:
    if settings.norm_unit == "action":
        return Term(offset=item.value)
    stats = item.row.stats
    if settings.return_level == "action":
        return Term(offset=item.value, count=stats.n_tokens)
    return Term(
        offset=item.offset(token_level=True),
        count=stats.n_tokens,
        kl_coef=item.kl_coef,
        suffix_kl_sum=stats.suffix_kl_sum,
        suffix_kl_sq_sum=stats.suffix_kl_sq_sum,
    )
