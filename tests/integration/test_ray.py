"""The same system in actors: the same numbers, and a clean end whatever dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from lightning_mappa.errors import InfrastructureError, RankLost
from lightning_mappa.run_folder import RunFolder
from lightning_mappa.runtime import placement
from tests.integration.conftest import SMALL, exported, run_fit, untimed_lines
from tests.processes import named

pytestmark = pytest.mark.slow
RAY = ("runtime=ray", "runtime.object_store_gb=0.2", "runtime.heartbeat_s=30")
ONE_TRAINED = ("agents.executor.trained=false", "agents.verifier.trained=false")
PROBES = "tests.integration.ray_probes"


@pytest.fixture(autouse=True)
def no_ray_left():
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """What every undisturbed or mended run has to equal."""
    folder = tmp_path_factory.mktemp("local") / "run"
    run_fit(folder, *ONE_TRAINED)
    return folder


def same(first: Path, second: Path) -> None:
    for agent in sorted(path.name for path in (first / "export").iterdir()):
        one, other = exported(first, agent), exported(second, agent)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    names = sorted(path.name for path in (first / "transcripts").iterdir())
    assert names == sorted(path.name for path in (second / "transcripts").iterdir())
    for name in names:
        assert untimed_lines(first, name) == untimed_lines(second, name)


@pytest.mark.parametrize("model", ["tiny", "tiny_lora"])
def test_actors_give_the_numbers_of_one_process(tmp_path, model):
    run_fit(tmp_path / "local", f"model={model}")
    summary = run_fit(tmp_path / "ray", f"model={model}", *RAY)
    same(tmp_path / "local", tmp_path / "ray")
    memory = summary["resources"]["peak_rss_gib"]
    assert {"driver", "engine", "rank 0 of agent solver"} <= memory.keys()
    assert all(value > 0.1 for value in memory.values())
    moved = summary["resources"]["weight_sync_bytes"]
    assert moved.keys() == {"solver", "executor", "verifier"}
    assert (moved["solver"] < 1_000_000) == (model == "tiny_lora")  # an adapter, or 0.8 million float32


def test_the_parts_of_a_run_spread_over_two_nodes(tmp_path, local, monkeypatch):
    monkeypatch.setattr(placement, "CPU_SHARE", 0.6)  # one part fits on a node
    memory = {"object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **memory})
    cluster.add_node(num_cpus=1, **memory)
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        run_fit(tmp_path / "ray", *ONE_TRAINED, "runtime=ray", f"runtime.address={cluster.address}")
        assert len({actor["Address"]["NodeID"] for actor in ray._private.state.actors().values()}) == 2
    finally:
        ray.shutdown()
        cluster.shutdown()
    same(local, tmp_path / "ray")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_hangs_is_started_again_from_the_last_checkpoint(tmp_path, local, number):
    start = time.monotonic()
    probe = (f"+callbacks.fault._target_={PROBES}.SignalOnce", f"+callbacks.fault.number={int(number)}")
    marker = f"+callbacks.fault.marker={tmp_path / 'marker'}"
    with pytest.warns(UserWarning, match="rank 0 of agent solver .*goes on from its last joint checkpoint"):
        summary = run_fit(tmp_path / "ray", *ONE_TRAINED, *RAY, *probe, marker)
    same(local, tmp_path / "ray")
    assert (summary["status"], summary["resources"]["restarts"]) == ("done", 1)
    assert time.monotonic() - start < 240


def test_restarts_come_to_an_end(tmp_path):
    probe = (f"+callbacks.fault._target_={PROBES}.SignalOnce", f"+callbacks.fault.number={int(signal.SIGKILL)}")
    with pytest.raises(RankLost, match="rank 0 of agent solver"):
        run_fit(tmp_path / "ray", *ONE_TRAINED, *RAY, *probe, "runtime.max_restarts=0")
    assert json.loads((tmp_path / "ray" / "summary.json").read_text())["status"].startswith("RankLost")


def test_an_engine_that_dies_decodes_its_wave_again(tmp_path, local):
    probe = (f"+callbacks.fault._target_={PROBES}.KillEngine",)
    run_fit(tmp_path / "ray", *ONE_TRAINED, *RAY, *probe)
    same(local, tmp_path / "ray")


def test_a_bug_in_a_callback_says_where_it_is(tmp_path):
    probe = (f"+callbacks.fault._target_={PROBES}.Bug",)
    with pytest.raises(RuntimeError, match=r"(?s)ZeroDivisionError.*ray_probes\.py"):
        run_fit(tmp_path / "ray", *ONE_TRAINED, *RAY, *probe)


def test_a_stopped_run_goes_on_elsewhere(tmp_path, local):
    folder = tmp_path / "ray"
    run_fit(folder, *ONE_TRAINED, *RAY, "trainer.max_steps=1")
    config = RunFolder.open(folder).config()
    assert config.runtime.name == "ray"
    arguments = [f"resume={folder}", "trainer.max_steps=2", "runtime=local", "runtime.num_threads=1"]
    command = [sys.executable, "-m", "lightning_mappa", "fit", *arguments]
    subprocess.run(command, check=True, timeout=240, capture_output=True)
    assert exported(folder, "solver").keys() == exported(local, "solver").keys()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_driver(tmp_path, number):
    folder = tmp_path / "run"
    arguments = [*SMALL, *ONE_TRAINED, *RAY, f"output_dir={folder}", "trainer.max_steps=500"]
    process = subprocess.Popen(
        [sys.executable, "-m", "lightning_mappa", "fit", *arguments], stderr=subprocess.PIPE, env={**os.environ}
    )
    deadline = time.monotonic() + 150
    while not (folder / "metrics.jsonl").exists():
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.5)
    parts = psutil.Process(process.pid).children(recursive=True)
    names = " ".join(name for name, _ in named(parts))
    assert all(name in names for name in ("raylet", "gcs_server", "ray::RankWorker", "ray::Transforme")), names
    process.send_signal(number)
    code = process.wait(timeout=90)
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else 3)
    _, alive = psutil.wait_procs(parts, timeout=120)  # two agents of Ray's own look once a minute
    assert not alive


def test_a_cluster_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(InfrastructureError, match=r"no Ray cluster \(runtime.address=127.0.0.1:1\)"):
        run_fit(tmp_path / "ray", "runtime=ray", "runtime.address=127.0.0.1:1")
