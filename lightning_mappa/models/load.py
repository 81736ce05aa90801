"""Models and tokenizers from where `model.path` points to, and the tensors that training changes."""

from __future__ import annotations

import copy
import importlib.resources
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lightning_mappa.errors import ConfigError, DataError
from lightning_mappa.models import smollm2

DTYPES = ("float32", "bfloat16", "float64")
PACKAGED = ("tiny", "tiny_tables")
"""Models that come with the package, by their folder."""


def resolve_path(path: str) -> Path | str:
    """The folder or Hugging Face id that `model.path` means.

    `tiny` and `tiny_tables` are the packaged models, `smollm2` the converted one (converted on first use); a
    folder that exists is itself; anything else that can be a Hugging Face id comes back unchanged.

    Raises:
        ConfigError: it looks like a folder but there is none.
    """
    if path in PACKAGED:
        return Path(str(importlib.resources.files("lightning_mappa.models") / path))
    if path == "smollm2":
        return smollm2.cached_folder()
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ConfigError(
            f"model.path: {path!r} is not a folder; allowed are {', '.join(PACKAGED)}, smollm2, a Hugging Face folder"
            " or id"
        )
    return path


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer at `model.path`, which must bring a chat template and an end-of-turn token."""
    source = resolve_path(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {path!r} holds no tokenizer ({_first_line(error)})") from error
    if not tokenizer.chat_template:
        raise ConfigError(f"model.path: the tokenizer of {path!r} has no chat template; use an instruct model")
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"model.path: the tokenizer of {path!r} has no eos token; set one in its folder")
    return tokenizer


def load_model(path: str, *, dtype: str) -> PreTrainedModel:
    """The causal LM at `model.path` with weights in `dtype`, as `from_pretrained` leaves it."""
    if dtype not in DTYPES:
        raise ConfigError(f"model.dtype: got {dtype!r}, allowed are {', '.join(DTYPES)}")
    source = resolve_path(path)
    if isinstance(source, Path) and (source / "adapter_config.json").exists():
        raise ConfigError(f"model.path: {path!r} is a PEFT adapter; give the folder or id of its base model")
    try:
        return AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {path!r} cannot be loaded as a causal LM ({_first_line(error)})") from error


def add_adapter(
    model: PreTrainedModel | PeftModel,
    *,
    r: int,
    alpha: int,
    dropout: float,
    target_modules: Sequence[str] | str,
    seed: int,
    name: str = "default",
) -> PeftModel:
    """Puts a LoRA adapter on `model` in place; the same seed gives the same adapter.

    A model that already has adapters gets one more; the one that was active stays so. The global random
    state is left as it was.

    Raises:
        ConfigError: a name in `target_modules` is not in the model, or r is not positive.
    """
    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    config = LoraConfig(r=r, lora_alpha=alpha, lora_dropout=dropout, target_modules=targets, task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        try:
            if not isinstance(model, PeftModel):
                return get_peft_model(model, config, adapter_name=name)
            model.add_adapter(name, config)
        except ValueError as error:
            raise ConfigError(f"model.lora: {_first_line(error)}") from error
    return model


def trained_tensors(model: PreTrainedModel | PeftModel, adapter: str | None = None) -> dict[str, Tensor]:
    """What training changes, by name: views that share memory with the model.

    All parameters of a plain model, tied ones once; only the adapter's tensors of a PeftModel, under names
    without the adapter's own, so that they fit an adapter of any name. `adapter` is the active one unless given.
    """
    return {name: parameter.detach() for name, parameter in trained_parameters(model, adapter).items()}


def trained_parameters(model: PreTrainedModel | PeftModel, adapter: str | None = None) -> dict[str, torch.nn.Parameter]:
    """The parameters themselves, as `trained_tensors` names them."""
    parameters = dict(model.named_parameters())
    if not isinstance(model, PeftModel):
        return parameters
    # PEFT's own get_peft_model_state_dict mixes adapters up when one is called, say, `weight` or `q_proj`.
    own = re.compile(rf"(\.lora_\w+)\.{re.escape(adapter or model.active_adapter)}(?=\.|$)")
    return {own.sub(r"\1", name): parameter for name, parameter in parameters.items() if own.search(name)}


def load_trained_tensors(
    model: PreTrainedModel | PeftModel, tensors: Mapping[str, Tensor], adapter: str | None = None
) -> None:
    """Copies `tensors` into the model in place: all of what `trained_tensors` names, or nothing at all.

    Raises:
        DataError: a tensor is missing, unknown or of another shape; nothing was written then.
    """
    own = trained_tensors(model, adapter)
    if missing := own.keys() - tensors.keys():
        raise DataError(f"{len(missing)} tensors are missing, among them {min(missing)}")
    if unknown := tensors.keys() - own.keys():
        raise DataError(f"{len(unknown)} tensors are unknown to the model, among them {min(unknown)}")
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            raise DataError(f"{name} has shape {list(tensors[name].shape)}, the model's is {list(tensor.shape)}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def load_config(path: str) -> tuple[PretrainedConfig, GenerationConfig | None]:
    """What the model at `model.path` says of itself, without its weights."""
    source = resolve_path(path)
    try:
        config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {path!r} cannot be loaded as a causal LM ({_first_line(error)})") from error
    try:
        return config, GenerationConfig.from_pretrained(source)
    except OSError:
        return config, None


def context_length(model: PreTrainedModel | PeftModel, override: int | None) -> int:
    """`context_limit` of a loaded model."""
    return context_limit(model.config, override)


def context_limit(config: PretrainedConfig, override: int | None) -> int:
    """Most tokens that prompt and response may have together: `override` where given, else the model's own."""
    own: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    if override is None:
        if own is None:
            raise ConfigError("model.context_length: the model's config names no limit; set one")
        return own
    if override < 1 or (own is not None and override > own):
        raise ConfigError(f"model.context_length: got {override}, allowed is 1 to {own or 'any length'}")
    return override


def end_of_turn_ids(model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """`turn_end_ids` of a loaded model."""
    return turn_end_ids(model.config, model.generation_config, tokenizer)


def turn_end_ids(
    config: PretrainedConfig, generation_config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """Every id that ends a turn, as generation config, model config and tokenizer name them."""
    named = [
        getattr(generation_config, "eos_token_id", None),
        getattr(config, "eos_token_id", None),
        tokenizer.eos_token_id,
    ]
    return frozenset(one for ids in named if ids is not None for one in (ids if isinstance(ids, list) else [ids]))


def export(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    adapter: str | None = None,
) -> None:
    """Writes a Hugging Face folder, or a PEFT adapter for a PeftModel, each with the tokenizer.

    The adapter lies in `folder` itself whatever its name, so that
    `AutoPeftModelForCausalLM.from_pretrained(folder)` finds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(model, PeftModel):
        config = copy.copy(model.peft_config[adapter or model.active_adapter])
        config.inference_mode = True
        config.save_pretrained(str(folder))
        tensors = {name: tensor.contiguous() for name, tensor in trained_tensors(model, adapter).items()}
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    else:
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
