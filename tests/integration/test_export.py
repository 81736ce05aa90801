"""`mappa export`: every version that a run folder holds, as folders that other libraries load."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_mappa.agents import load_agents
from lightning_mappa.config import structured
from lightning_mappa.errors import ConfigError, DataError
from lightning_mappa.export import export
from lightning_mappa.rollout.engine import GenerationRequest, SamplingParams
from lightning_mappa.saved_weights import last_weights
from lightning_mappa.system import build_engine
from tests.integration.conftest import run_fit

AGENTS = ("solver", "verifier")
"""Trained; the executor is frozen."""
SETTINGS = (
    *(
        "trainer.max_steps=3",
        "trainer.val_check_interval=2",
        "trainer.checkpoint_every=1",
        "trainer.keep_checkpoints=3",
    ),
    *("agents.executor.trained=false", "datamodule.val_limit=2"),
)


@pytest.fixture(scope="module", params=["tiny", "tiny_lora"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp(request.param) / "run"
    run_fit(folder, f"model={request.param}", *SETTINGS)
    return folder


def exported(run: Path, **options: Any) -> dict[str, Any]:
    saved = OmegaConf.load(run / "config.yaml")
    assert isinstance(saved, DictConfig)
    return export(structured(OmegaConf.merge(saved, {"run": str(run), "export": options})))  # type: ignore[arg-type]


def weights(folder: Path) -> dict[str, Tensor]:
    (path,) = folder.glob("*.safetensors")
    return load_file(path)


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Bit for bit, in the names that a plain model and an adapter are exported under."""
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


def test_the_last_version_is_what_training_ended_with_to_the_bit(trained: Path, tmp_path: Path):
    result = exported(trained, version="last", to=str(tmp_path / "out"))
    assert (result["version"], set(result["folders"])) == (3, set(AGENTS))
    for agent_id in AGENTS:
        out = weights(Path(result["folders"][agent_id]))
        assert same(out, load_file(trained / "agents" / agent_id / "last.safetensors"))
        assert not same(
            out, weights(Path(exported(trained, version="1", to=str(tmp_path / agent_id))["folders"][agent_id]))
        )


def test_the_selected_version_is_the_one_without_a_word_and_what_fit_exported(trained: Path, tmp_path: Path):
    version = json.loads((trained / "summary.json").read_text())["selected_version"]
    named = exported(trained, version="selected", to=str(tmp_path / "a"))
    plain = exported(trained, to=str(tmp_path / "b"))
    assert named["version"] == plain["version"] == version
    for agent_id in AGENTS:
        out = weights(tmp_path / "a" / agent_id)
        assert same(out, weights(tmp_path / "b" / agent_id))
        assert same(out, weights(trained / "export" / agent_id))
        kept = trained / "agents" / agent_id / "selected" / f"version-{version:06d}.safetensors"
        assert same(out, load_file(kept))


def test_a_checkpoint_holds_what_training_ended_with(trained: Path, tmp_path: Path):
    """Of the same version, through Lightning's file and not through the tensors beside it."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    before = exported(run, version="last", to=str(tmp_path / "before"))
    assert (run / "checkpoints" / "step-000002").is_dir()
    two = exported(run, version="2", to=str(tmp_path / "two"))
    for agent_id in AGENTS:
        state = torch.load(run / "checkpoints" / "step-000002" / f"{agent_id}.ckpt", weights_only=True)["state_dict"]
        for name, tensor in weights(Path(two["folders"][agent_id])).items():
            (inside,) = [value for key, value in state.items() if key.replace(".default", "") == f"policy.model.{name}"]
            assert torch.equal(tensor, inside)
        assert not same(weights(Path(two["folders"][agent_id])), weights(Path(before["folders"][agent_id])))
        (run / "agents" / agent_id / "last.safetensors").unlink()
    assert last_weights_version(run) == 2


def last_weights_version(run: Path) -> int:
    from lightning_mappa.run_folder import RunFolder

    return last_weights(RunFolder.open(run), AGENTS).version


@pytest.mark.parametrize("version", ["selected", "last"])
def test_an_exported_agent_says_what_the_engine_says(trained: Path, tmp_path: Path, version: str):
    """Greedily, token for token, with the exported tokenizer's ids."""
    result = exported(trained, version=version, to=str(tmp_path / "out"))
    cfg = structured(OmegaConf.load(trained / "config.yaml"))  # type: ignore[arg-type]
    engine = build_engine(cfg, load_agents(cfg))
    lora = cfg.agents.solver.model.lora is not None
    for agent_id in AGENTS:
        folder = Path(result["folders"][agent_id])
        source = trained / "agents" / agent_id
        kept = source / "last.safetensors" if version == "last" else source / "selected" / _selected(source)
        engine.update_weights(agent_id, result["version"], load_file(kept))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids: Any = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Solve: 12 + 7 = ?"}], add_generation_prompt=True, return_dict=False
        )
        served = asyncio.run(_greedy(engine, agent_id, tuple(ids)))
        model: Any = (AutoPeftModelForCausalLM if lora else AutoModelForCausalLM).from_pretrained(folder)
        out = model.generate(input_ids=torch.tensor([ids]), max_new_tokens=24, do_sample=False)
        assert tuple(out[0, len(ids) :].tolist()) == served
        assert tokenizer.decode(list(served))


def _selected(source: Path) -> str:
    name: str = json.loads((source / "selected" / "selected.json").read_text())["tensors"]
    return name


async def _greedy(engine: Any, agent_id: str, prompt_ids: tuple[int, ...]) -> tuple[int, ...]:
    request = GenerationRequest(
        agent_id=agent_id,
        prompt_ids=prompt_ids,
        sampling=SamplingParams(max_new_tokens=24, temperature=0.0),
        seed=0,
    )
    async with engine.session("one") as session:
        ids: tuple[int, ...] = (await session.generate(request)).response_ids
        return ids


def test_one_agent_goes_where_it_is_told(trained: Path, tmp_path: Path):
    result = exported(trained, agent="verifier", to=str(tmp_path))
    assert list(result["folders"]) == ["verifier"]
    assert [path.name for path in tmp_path.iterdir()] == ["verifier"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"agent": "executor"}, "agent=executor is frozen and has its model's own weights; allowed: solver, verifier"),
        ({"agent": "critic"}, "agent=critic is no agent of the run; allowed: solver, verifier"),
        ({"version": "9"}, r"version=9 is not in .*; allowed: .*1, 2, 3, selected, last$"),
        ({"version": "best"}, "version=best is no version; allowed: selected, last or a number"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(trained: Path, options: dict[str, str], sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        exported(trained, **options)


def test_a_folder_with_something_in_it_is_left_alone(trained: Path, tmp_path: Path):
    (tmp_path / "solver").mkdir()
    (tmp_path / "solver" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"to=.*solver is there already and not empty"):
        exported(trained, to=str(tmp_path))
    assert [path.name for path in tmp_path.rglob("*")] == ["solver", "notes.txt"]


def test_a_checkpoint_newer_than_the_last_end_is_the_last_version(trained: Path, tmp_path: Path):
    """A run that went on from its end and broke off: what it ended with before is old."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    shutil.copytree(run / "checkpoints" / "step-000002", run / "checkpoints" / "step-000004")
    assert last_weights_version(run) == 4
    (run / "checkpoints" / "step-000004" / "solver.ckpt").write_bytes(b"torn")
    assert last_weights_version(run) == 3
    with pytest.raises(DataError, match=r"version=4: the checkpoint .* is damaged: solver.ckpt is not what was"):
        exported(run, version="4")


def test_a_run_without_weights_says_so(trained: Path, tmp_path: Path):
    (tmp_path / "config.yaml").write_text((trained / "config.yaml").read_text())
    with pytest.raises(DataError, match="holds no weights: it has neither ended nor saved a checkpoint"):
        exported(tmp_path)
    with pytest.raises(ConfigError, match=r"version=selected: .* holds no selected weights; allowed: last or a number"):
        exported(tmp_path, version="selected")
