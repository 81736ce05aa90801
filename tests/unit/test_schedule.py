import pytest

from lightning_mappa.schedule import lr_factor


def course(max_steps: int, warmup_ratio: float) -> list[float]:
    return [
        lr_factor(step, max_steps=max_steps, warmup_ratio=warmup_ratio, min_lr_ratio=0.1)
        for step in range(max_steps + 2)
    ]


def test_warm_up_is_linear_then_a_cosine_falls_to_the_floor_and_stays():
    # warm-up ceil(0.25 · 8) = 2 steps; then 0.1 + 0.9 · (1 + cos(pi · k / 6)) / 2 for k = 0 … 6
    expected = [0.5, 1.0, 1.0, 0.939711, 0.775, 0.55, 0.325, 0.160289, 0.1, 0.1]
    assert course(8, 0.25) == pytest.approx(expected, abs=1e-6)


def test_without_warm_up_the_first_step_has_the_full_rate():
    assert course(4, 0.0)[0] == 1.0


def test_warm_up_of_the_whole_run_ends_at_the_floor():
    assert course(2, 1.0) == pytest.approx([0.5, 1.0, 1.0, 0.1])


def test_one_step_has_the_full_rate():
    assert course(1, 0.03)[0] == 1.0
