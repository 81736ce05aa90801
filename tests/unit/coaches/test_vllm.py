"""What is wrong with a coach model in vLLM before an engine starts."""

from __future__ import annotations

import asyncio
import importlib.util

import pytest

from lightning_mappa.coaches.vllm import VLLMProvider
from lightning_mappa.errors import ConfigError


@pytest.mark.parametrize(
    ("setting", "value", "sentence"),
    [
        ("temperature", 3, "coach.provider.temperature is 3; allowed: 0, or 0.01 to 2"),
        ("temperature", 0.001, "coach.provider.temperature is 0.001; allowed: 0, or 0.01 to 2"),
        ("dtype", "int8", "coach.provider.dtype is 'int8'; allowed: float32, bfloat16"),
    ],
)
def test_wrong_settings_are_refused_in_one_sentence(setting, value, sentence):
    with pytest.raises(ConfigError) as refused:
        VLLMProvider("tiny", **{setting: value})
    assert str(refused.value) == sentence


@pytest.mark.parametrize("package", ["ray", "vllm"])
def test_without_the_packages_there_is_one_sentence(monkeypatch, package):
    found = importlib.util.find_spec

    def find(name, *rest):
        return None if name == package else found("json") if name in ("ray", "vllm") else found(name, *rest)

    monkeypatch.setattr("importlib.util.find_spec", find)
    with pytest.raises(ConfigError, match=rf"coach=vllm needs the package {package}: pip install"):
        asyncio.run(VLLMProvider("tiny").check())


def test_a_model_that_is_not_there_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: object())
    with pytest.raises(ConfigError, match=r"model.path: .*nothing' is not a folder"):
        asyncio.run(VLLMProvider(f"{tmp_path}/nothing").check())


def test_one_that_was_never_asked_is_closed(monkeypatch):
    asyncio.run(VLLMProvider("tiny").close())
