import dataclasses

import torch

from lightning_mappa.datamodules.collate import collate
from lightning_mappa.types import MaskReason
from tests.unit.factories import make_experience


def experience(index, prompt_ids, response_ids, rollout_log_probs):
    return make_experience(
        key=("e", index),
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        rollout_log_probs=rollout_log_probs,
    )


def test_rows_are_prompt_then_response_then_padding():
    first = experience(0, (1, 2), (3,), (-0.5,))
    second = experience(1, (4,), (5, 6, 7), (-1.0, -2.0, -3.0))
    batch = collate([first, second], step=7)
    assert batch.step == 7
    assert batch.experiences == (first, second)
    assert batch.input_ids_BT.tolist() == [[1, 2, 3, 0], [4, 5, 6, 7]]
    assert batch.attention_mask_BT.tolist() == [[True, True, True, False], [True] * 4]
    assert batch.response_mask_BT.tolist() == [[False, False, True, False], [False, True, True, True]]
    assert batch.rollout_log_probs_BT.tolist() == [[0.0, 0.0, -0.5, 0.0], [0.0, -1.0, -2.0, -3.0]]
    assert batch.rollout_log_probs_BT.dtype is torch.float32


def test_a_row_without_response_stays_a_row():
    empty = dataclasses.replace(experience(0, (1, 2, 3), (), ()), masked=MaskReason.PROMPT_TOO_LONG)
    batch = collate([empty, experience(1, (4,), (5,), (-1.0,))], step=0)
    assert batch.response_mask_BT.any(1).tolist() == [False, True]
    assert batch.attention_mask_BT.sum(1).tolist() == [3, 2]


def test_no_experience_makes_an_empty_batch():
    batch = collate([], step=3)
    assert len(batch) == 0
    assert batch.input_ids_BT.shape == (0, 0)
    assert batch.temperature == 1.0


def test_what_is_trained_on_is_what_was_generated_from():
    rows = [experience(i, tuple(range(1, 2 + i)), tuple(range(9, 12 + i)), (-1.0,) * (3 + i)) for i in range(4)]
    batch = collate(rows, step=0)
    for row, e in enumerate(rows):
        assert tuple(batch.input_ids_BT[row][batch.attention_mask_BT[row]].tolist()) == e.prompt_ids + e.response_ids
        assert tuple(batch.input_ids_BT[row][batch.response_mask_BT[row]].tolist()) == e.response_ids
