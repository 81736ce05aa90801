"""Which tasks a rollout step plays: a function of seed and step, so that a resumed run needs no cursor."""

from __future__ import annotations

import random
from collections.abc import Sequence

from lightning_mappa.tasks.strata import stratified_batch
from lightning_mappa.types import Task

STRATUM = "stratum"
"""Key of a task's metadata: where every task has one, each batch holds the strata in their shares."""


def step_tasks(tasks: Sequence[Task], *, seed: int, step: int, batch_size: int) -> list[Task]:
    """The `batch_size` tasks of rollout step `step`.

    Tasks are shuffled anew in every pass over them; a batch may reach into the next pass, and when it is
    larger than the data it takes as many passes as it needs. Tasks that all name a stratum are dealt evenly.
    """
    strata = [str(task.metadata[STRATUM]) for task in tasks if task.metadata.get(STRATUM) is not None]
    if len(strata) == len(tasks):
        return [tasks[index] for index in stratified_batch(strata, seed=seed, step=step, batch_size=batch_size)]
    chosen = []
    for position in range(step * batch_size, (step + 1) * batch_size):
        epoch, offset = divmod(position, len(tasks))
        chosen.append(tasks[_shuffled(len(tasks), seed, epoch)[offset]])
    return chosen


def _shuffled(count: int, seed: int, epoch: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
