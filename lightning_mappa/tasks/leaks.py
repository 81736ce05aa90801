"""Problems of one split that are in another too, word for word or nearly."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
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
        for our_id, their_id in _candidates(ours, theirs, max_containment):
            one, other = ours[our_id], theirs[their_id]
            containment = len(one.grams & other.grams) / min(len(one.grams), len(other.grams))
            exact = one.text == other.text
            if exact or (max_containment is not None and containment >= max_containment):
                pair = f"{first}/{our_id}", f"{second}/{their_id}"
                leaks.append(Leak(first=pair[0], second=pair[1], containment=containment, exact=exact))
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


Prints = Mapping[str, Fingerprint]


def _candidates(ours: Prints, theirs: Prints, threshold: float | None) -> list[tuple[str, str]]:
    """Pairs among which are all that reach the threshold or are equal, in the order of `ours`.

    The shorter of such a pair shares so many of its n-grams that at least one of its *rare* ones is among them:
    with m of them, one of the m - ⌈t m⌉ + 1 rarest. So the openings that half of all problems have lead nowhere.
    """
    if threshold is None:
        texts = _index({name: [one.text] for name, one in theirs.items()})
        return [(our_id, name) for our_id, one in ours.items() for name in texts.get(one.text, ())]
    holders = [_index({name: one.grams for name, one in side.items()}) for side in (ours, theirs)]
    frequency = Counter(gram for side in (ours, theirs) for one in side.values() for gram in one.grams)

    def rare(one: Fingerprint) -> list[int]:
        count = len(one.grams) - math.ceil(threshold * len(one.grams) - 1e-9) + 1
        return sorted(one.grams, key=lambda gram: (frequency[gram], gram))[:count]

    found = {(our_id, name) for our_id, one in ours.items() for gram in rare(one) for name in holders[1].get(gram, ())}
    found |= {
        (name, their_id) for their_id, one in theirs.items() for gram in rare(one) for name in holders[0].get(gram, ())
    }
    our_place, their_place = ({name: number for number, name in enumerate(side)} for side in (ours, theirs))
    return sorted(found, key=lambda pair: (our_place[pair[0]], their_place[pair[1]]))


def _index(keys: Mapping[str, Iterable[int]]) -> dict[int, list[str]]:
    """Key → names that have it."""
    holders: dict[int, list[str]] = defaultdict(list)
    for name, of_name in keys.items():
        for key in of_name:
            holders[key].append(name)
    return holders


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
