from collections import Counter

from lightning_mappa.rollout.task_order import step_tasks
from lightning_mappa.types import Task


def tasks(*strata):
    return [
        Task(id=f"t{i}", kind="k", prompt="?", metadata={} if stratum is None else {"stratum": stratum})
        for i, stratum in enumerate(strata)
    ]


def test_each_batch_holds_every_stratum_in_its_share():
    source = tasks(*"aaaaaabbbccc")  # 6 : 3 : 3
    for seed in range(20):
        for step in range(6):
            batch = step_tasks(source, seed=seed, step=step, batch_size=4)
            counts = Counter(task.metadata["stratum"] for task in batch)
            assert counts == {"a": 2, "b": 1, "c": 1}
    passes = [step_tasks(source, seed=3, step=step, batch_size=4) for step in range(6)]
    flat = [task.id for batch in passes for task in batch]
    assert sorted(flat[:12]) == sorted(flat[12:]) == sorted(task.id for task in source)
    assert flat[:12] != flat[12:]


def test_tasks_of_which_one_names_no_stratum_are_shuffled_as_they_are():
    source = tasks("a", "a", None, "b")
    plain = tasks(None, None, None, None)
    for step in range(3):
        order = [task.id for task in step_tasks(source, seed=1, step=step, batch_size=3)]
        assert order == [task.id for task in step_tasks(plain, seed=1, step=step, batch_size=3)]
