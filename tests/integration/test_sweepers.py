"""A sweeper that chooses its own values, by what a run returns."""

import re
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from lightning_mappa.files import read_json
from tests.integration.conftest import SMALL
from tests.packages import needs

pytestmark = [pytest.mark.slow, needs("optuna")]


def test_optuna_takes_the_better_of_its_trials(tmp_path):
    command = [sys.executable, "-m", "lightning_mappa", "fit", "-m", *SMALL, "trainer.max_steps=1"]
    sweep = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1"]
    sweep += ["hydra.sweeper.direction=maximize", "optimizer.lr=interval(1e-4,1e-3)"]
    folder = f"output_dir={tmp_path}/sweep"
    done = subprocess.run([*command, *sweep, folder], capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rates = [OmegaConf.load(tmp_path / "sweep" / job / "config.yaml").optimizer.lr for job in ("0", "1")]
    assert 1e-4 <= min(rates) < max(rates) <= 1e-3
    found = [read_json(tmp_path / "sweep" / job / "summary.json")["val"]["success"]["selected"] for job in ("0", "1")]
    (best,) = re.findall(r"Best value: (\S+)", done.stdout)
    assert float(best) == max(found)
