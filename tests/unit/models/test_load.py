from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer, GenerationConfig

from lightning_mappa.errors import ConfigError, DataError
from lightning_mappa.models import load
from lightning_mappa.models.char_tokenizer import char_tokenizer
from lightning_mappa.testing import tiny_llama

VOCABULARY = 103
LORA: dict[str, Any] = {"r": 4, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear"}


def shift(model, by, adapter=None):
    for tensor in load.trained_tensors(model, adapter).values():
        tensor.add_(by)


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(8)[None]).logits


def test_paths(tmp_path: Path):
    assert load.resolve_path("tiny") == Path(load.__file__).parent / "tiny"
    assert load.resolve_path(str(tmp_path)) == tmp_path
    assert load.resolve_path("HuggingFaceTB/SmolLM2-135M-Instruct") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    for missing in ("./none", str(tmp_path / "none"), "~/none-such", "a/b/c"):
        with pytest.raises(ConfigError, match=r"model\.path: .*is not a folder"):
            load.resolve_path(missing)


def test_exported_model_loads_again(tmp_path: Path):
    model = tiny_llama(VOCABULARY, 0)
    load.export(model, char_tokenizer(), tmp_path)
    again = load.load_model(str(tmp_path), dtype="float32")
    assert torch.equal(logits(model), logits(again))
    assert again.config._attn_implementation == "sdpa"
    assert load.load_model(str(tmp_path), dtype="bfloat16").dtype == torch.bfloat16
    assert load.load_tokenizer(str(tmp_path)).chat_template == char_tokenizer().chat_template
    with pytest.raises(ConfigError, match=r"model\.dtype: got 'float8', allowed are float32"):
        load.load_model(str(tmp_path), dtype="float8")


@pytest.mark.parametrize("name", ["default", "solver"])
def test_exported_adapter_loads_again(tmp_path: Path, name):
    tiny_llama(VOCABULARY, 0).save_pretrained(tmp_path / "base")
    model = load.add_adapter(load.load_model(str(tmp_path / "base"), dtype="float32"), **LORA, seed=0, name=name)
    shift(model, 0.1)
    load.export(model, char_tokenizer(), tmp_path / "adapter")
    again = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(model), logits(again))
    assert AutoTokenizer.from_pretrained(tmp_path / "adapter").eos_token == "<|end|>"
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    with pytest.raises(ConfigError, match="PEFT adapter"):
        load.load_model(str(tmp_path / "adapter"), dtype="float32")


def test_folders_without_model_or_template_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"model\.path: .*holds no tokenizer"):
        load.load_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match=r"model\.path: .*cannot be loaded"):
        load.load_model(str(tmp_path), dtype="float32")
    tokenizer = char_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.path: .*no chat template"):
        load.load_tokenizer(str(tmp_path))


def test_trained_tensors_of_a_plain_model_hold_tied_weights_once():
    model = tiny_llama(VOCABULARY, 0)
    tensors = load.trained_tensors(model)
    assert "model.embed_tokens.weight" in tensors
    assert "lm_head.weight" not in tensors
    assert sum(one.numel() for one in tensors.values()) == sum(one.numel() for one in model.parameters())
    other = tiny_llama(VOCABULARY, 1)
    load.load_trained_tensors(other, tensors)
    assert torch.equal(logits(model), logits(other))
    assert other.lm_head.weight.data_ptr() == other.model.embed_tokens.weight.data_ptr()


def test_adapters_are_seeded_and_keep_apart():
    def make(seed):
        return load.add_adapter(tiny_llama(VOCABULARY, 0), **LORA, seed=seed, name=f"agent{seed}")

    state = torch.get_rng_state()
    first, again, other = make(0), make(0), make(1)
    assert torch.equal(state, torch.get_rng_state())
    names = load.trained_tensors(first)
    assert names.keys() == load.trained_tensors(other).keys()
    assert all("lora_" in name and "agent" not in name for name in names)
    assert len(names) == 2 * 7 * 2
    assert all(torch.equal(one, load.trained_tensors(again)[name]) for name, one in names.items())
    assert not all(torch.equal(one, load.trained_tensors(other)[name]) for name, one in names.items())
    assert torch.equal(logits(first), logits(tiny_llama(VOCABULARY, 0)))

    load.add_adapter(first, **LORA, seed=1, name="second")
    assert first.active_adapter == "agent0"
    before = {name: one.clone() for name, one in load.trained_tensors(first).items()}
    shift(other, 0.2)
    load.load_trained_tensors(first, load.trained_tensors(other), adapter="second")
    assert all(torch.equal(one, before[name]) for name, one in load.trained_tensors(first).items())
    first.set_adapter("second")
    assert torch.equal(logits(first), logits(other))


def test_adapters_may_have_any_name():
    model, names = tiny_llama(VOCABULARY, 0), ("solver", "solver_2", "weight", "q_proj", "model")
    for seed, name in enumerate(names):
        model = load.add_adapter(model, **LORA, seed=seed, name=name)
    alone = load.trained_tensors(load.add_adapter(tiny_llama(VOCABULARY, 0), **LORA, seed=2))
    assert all(load.trained_tensors(model, name).keys() == alone.keys() for name in names)
    assert all(torch.equal(one, alone[name]) for name, one in load.trained_tensors(model, "weight").items())


def test_unknown_target_modules_are_refused():
    with pytest.raises(ConfigError, match=r"model\.lora: Target modules"):
        load.add_adapter(tiny_llama(VOCABULARY, 0), **LORA | {"target_modules": ["none"]}, seed=0)


def test_tensors_are_loaded_all_or_not_at_all():
    model = tiny_llama(VOCABULARY, 0)
    before = logits(model)
    good = {name: one + 1 for name, one in load.trained_tensors(model).items()}
    last = list(good)[-1]
    for bad, message in (
        ({name: one for name, one in good.items() if name != last}, f"1 tensors are missing, among them {last}"),
        (good | {"x": torch.zeros(1)}, "1 tensors are unknown to the model, among them x"),
        (good | {last: torch.zeros(3)}, r"has shape \[3\]"),
    ):
        with pytest.raises(DataError, match=message):
            load.load_trained_tensors(model, bad)
    assert torch.equal(logits(model), before)


def test_context_length():
    model = tiny_llama(VOCABULARY, 0)
    assert load.context_length(model, None) == 512
    assert load.context_length(load.add_adapter(model, **LORA, seed=0), 100) == 100
    for wrong in (0, 513):
        with pytest.raises(ConfigError, match=rf"model\.context_length: got {wrong}, allowed is 1 to 512"):
            load.context_length(model, wrong)


def test_end_of_turn_ids_come_from_all_three_places():
    model, tokenizer = tiny_llama(VOCABULARY, 0), char_tokenizer()
    assert load.end_of_turn_ids(model, tokenizer) == {6}
    model.config.eos_token_id = 8
    model.generation_config = GenerationConfig(eos_token_id=[6, 9])
    assert load.end_of_turn_ids(model, tokenizer) == {6, 8, 9}


def test_random_models_are_the_same_for_the_same_seed():
    assert torch.equal(logits(tiny_llama(VOCABULARY, 3)), logits(tiny_llama(VOCABULARY, 3)))
    assert not torch.equal(logits(tiny_llama(VOCABULARY, 3)), logits(tiny_llama(VOCABULARY, 4)))
