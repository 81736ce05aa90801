from collections.abc import Iterator

import pytest

from lightning_mappa.tables.metric_process import MetricProcess


@pytest.fixture(scope="session")
def process() -> Iterator[MetricProcess]:
    process = MetricProcess()
    yield process
    process.close()
