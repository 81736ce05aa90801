"""Problems of one split that are in another too, word for word or nearly."""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from lightning_mappa.errors import ConfigError

N = 8
"""Words in a row that are compared."""
MAX_CONTAINMENT = 0.5
SHOWN = 20
_WORD = re.compile(r"[^\W_]+")
_WORD_OR_SIGN = re.compile(r"[^\W_]+|[-+*/=<>^|%]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What is left of a problem's text for comparison: hashes."""

    text: int
    """Of the normalised text."""
    grams: frozenset[int]
    """Of every run of `N` words and numbers; of the normalised text where it has fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    first: str
    """Its split and id: `train/1983-1`."""
    second: str
    containment: float
    """Share of the n-grams of the shorter problem that the other has as well."""
    exact: bool
    """The normalised texts are the same."""

    def __str__(self) -> str:
        how = "the same text" if self.exact else f"{self.containment:.0%} of the {N}-grams"
        return f"{self.first} and {self.second} ({how})"


def normalised(text: str) -> str:
    """Words, numbers and signs of operations in lower case: layout, punctuation and LaTeX make no other problem."""
    return " ".join(_WORD_OR_SIGN.findall(text.casefold()))


def fingerprint(text: str) -> Fingerprint:
    words = _WORD.findall(text.casefold())
    runs = [" ".join(words[i : i + N]) for i in range(len(words) - N + 1)] or [normalised(text)]
    return Fingerprint(text=_hash(normalised(text)), grams=frozenset(map(_hash, runs)))


def find_leaks(
    splits: Mapping[str, Mapping[str, Fingerprint]], *, max_containment: float | None = MAX_CONTAINMENT
) -> list[Leak]:
    """All pairs of problems from two splits with the same normalised text or a containment of at least that.

    `splits` maps split → id → fingerprint. With `max_containment` None only equal texts count. The pairs
    come in the order of the splits and ids.
    """
    leaks = []
    for (first, ours), (second, theirs) in combinations(splits.items(), 2):
        for (our_id, one), (their_id, other), shared in _sharing(ours, theirs):
            containment = shared / min(len(one.grams), len(other.grams))
            exact = one.text == other.text
            if exact or (max_containment is not None and containment >= max_containment):
                leaks.append(
                    Leak(first=f"{first}/{our_id}", second=f"{second}/{their_id}", containment=containment, exact=exact)
                )
    return leaks


def refuse_leaks(
    splits: Mapping[str, Sequence[tuple[str, str]]], *, max_containment: float | None = MAX_CONTAINMENT
) -> None:
    """`splits` maps split → (id, text) of its problems. Raises `ConfigError` that lists the pairs, the first
    `SHOWN` of them."""
    prints = {split: {name: fingerprint(text) for name, text in problems} for split, problems in splits.items()}
    leaks = find_leaks(prints, max_containment=max_containment)
    if leaks:
        rest = [f"… and {len(leaks) - SHOWN} more"] if len(leaks) > SHOWN else []
        raise ConfigError(
            f"task: {len(leaks)} pairs of problems are in two splits, so that figures would be too good; take them"
            " out of one, or choose another set:\n  " + "\n  ".join([*map(str, leaks[:SHOWN]), *rest])
        )


_Named = tuple[str, Fingerprint]


def _sharing(
    ours: Mapping[str, Fingerprint], theirs: Mapping[str, Fingerprint]
) -> Iterator[tuple[_Named, _Named, int]]:
    """Pairs that share an n-gram, and how many."""
    holders: dict[int, list[str]] = defaultdict(list)
    for name, one in ours.items():
        for gram in one.grams:
            holders[gram].append(name)
    order = {name: place for place, name in enumerate(ours)}
    found: list[tuple[int, _Named, _Named, int]] = []
    for their_id, other in theirs.items():
        shared = Counter(name for gram in other.grams for name in holders.get(gram, ()))
        found += [(order[n], (n, ours[n]), (their_id, other), count) for n, count in shared.items()]
    for _, our, their, count in sorted(found, key=lambda item: item[0]):
        yield our, their, count


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
