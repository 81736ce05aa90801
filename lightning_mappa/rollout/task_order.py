"""Which tasks a rollout step plays: a function of seed and step, so that a resumed run needs no cursor."""

from __future__ import annotations

import random
from collections.abc import Sequence

from lightning_mappa.types import Task


def step_tasks(tasks: Sequence[Task], *, seed: int, step: int, batch_size: int) -> list[Task]:
    """The `batch_size` tasks of rollout step `step`.

    Tasks are shuffled anew in every pass over them; a batch may reach into the next pass, and when it is
    larger than the data it takes as many passes as it needs.
    """
    chosen = []
    for position in range(step * batch_size, (step + 1) * batch_size):
        epoch, offset = divmod(position, len(tasks))
        chosen.append(tasks[_shuffled(len(tasks), seed, epoch)[offset]])
    return chosen


def _shuffled(count: int, seed: int, epoch: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
