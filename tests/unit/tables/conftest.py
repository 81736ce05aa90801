from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_mappa.tables.metric_process import MetricProcess


@pytest.fixture(scope="session")
def process() -> Iterator[MetricProcess]:
    process = MetricProcess()
    yield process
    process.close()


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    return folder
