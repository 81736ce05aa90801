"""Even dealing: subsets and batches that hold every stratum in its share."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence


def dealt(strata: Sequence[str], *, seed: str) -> list[int]:
    """A random order of all indices in which every beginning holds each stratum in its share, to within one.

    `strata[i]` is that of index i. Place by place, the stratum that is due first comes next (Baruah et al. 1996,
    proportionate progress): the k-th of m, from 1, belongs between the places ⌊(k-1) n/m⌋ and ⌈k n/m⌉ of n.
    """
    rng = random.Random(seed)
    waiting: dict[str, list[int]] = defaultdict(list)
    for index, stratum in enumerate(strata):
        waiting[stratum].append(index)
    names = sorted(waiting)
    rng.shuffle(names)  # who comes first among those due at the same place
    for name in names:
        rng.shuffle(waiting[name])
    n, size = len(strata), {name: len(waiting[name]) for name in names}
    taken = dict.fromkeys(names, 0)
    order = []
    for place in range(n):
        open_now = [name for name in names if taken[name] < size[name] and taken[name] * n // size[name] <= place]
        name = min(open_now, key=lambda name: -(-(taken[name] + 1) * n // size[name]))
        order.append(waiting[name][taken[name]])
        taken[name] += 1
    return order


def draw(strata: Sequence[str], count: int, *, seed: int) -> list[int]:
    """`count` different indices, each stratum in its share, in ascending order; the same for the same seed."""
    return sorted(dealt(strata, seed=f"draw/{seed}")[:count])


def stratified_batch(strata: Sequence[str], *, seed: int, step: int, batch_size: int) -> list[int]:
    """The indices of rollout step `step`: a function of the step, so that a resumed run needs no cursor.

    Every pass over the data is dealt anew; a batch may reach into the next pass.
    """
    chosen = []
    orders: dict[int, list[int]] = {}
    for position in range(step * batch_size, (step + 1) * batch_size):
        epoch, offset = divmod(position, len(strata))
        if epoch not in orders:
            orders[epoch] = dealt(strata, seed=f"{seed}/{epoch}")
        chosen.append(orders[epoch][offset])
    return chosen
