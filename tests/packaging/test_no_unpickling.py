"""No process of ours executes what a program left: no pickle in any dress, no eval, no shell."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("lightning_mappa", "callbacks", "datamodules")

ALLOWED = {
    ("lightning_mappa/tools/launcher.py", "exec"): "runs inside the sandbox, where the program is what it runs",
    ("lightning_mappa/tools/warm_server.py", "exec"): "runs inside the sandbox; executes the launcher's own text",
}

PICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "shelve"}
EXECUTORS = {"eval", "exec", "os.system", "os.popen", "yaml.unsafe_load", "yaml.full_load", "yaml.load"}
PICKLE_READERS = ("read_pickle", "read_hdf", "Unpickler")
"""Of whatever object: a method's owner is not known from the text."""


def violations(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of everything in `source` that executes what it reads."""
    tree = ast.parse(source)
    names = _imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if _root(alias.name) in PICKLERS)
        elif isinstance(node, ast.ImportFrom) and _root(node.module or "") in PICKLERS:
            yield node.lineno, str(node.module)
        elif isinstance(node, ast.Constant) and node.value in PICKLERS:
            yield node.lineno, repr(node.value)  # for import_module, __import__ and sys.modules
        elif isinstance(node, ast.Attribute) and node.attr in PICKLE_READERS:
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, name) for name in _bad_call(node, _dotted(node.func, names)))


def _bad_call(call: ast.Call, name: str) -> Iterator[str]:
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}

    def is_literal(keyword: str, value: bool) -> bool:
        given = keywords.get(keyword)
        return isinstance(given, ast.Constant) and given.value is value

    if name.removeprefix("builtins.") in EXECUTORS or _root(name) in PICKLERS:
        yield name.removeprefix("builtins.")
    if name == "torch.load" and not is_literal("weights_only", True):
        yield name
    if "allow_pickle" in keywords and not is_literal("allow_pickle", False):
        yield name
    if "shell" in keywords and not is_literal("shell", False):
        yield name
    if name.startswith("numpy.") and name.endswith(".load") and (len(call.args) > 2 or None in keywords):
        yield name


def _imported(tree: ast.Module) -> dict[str, str]:
    """Local name -> what it stands for, over all imports of the file."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _dotted(node: ast.expr, names: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, names)}.{node.attr}"
    return "?"


def _root(name: str) -> str:
    return name.partition(".")[0]


def found_in_package() -> Iterator[tuple[str, str, int]]:
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):  # does not walk links: no file comes twice
            for line, name in violations(path.read_text(encoding="utf-8")):
                yield str(path.relative_to(ROOT)), name, line


def test_nothing_executes_what_it_reads():
    bad = [f"{file}:{line}: {name}" for file, name, line in found_in_package() if (file, name) not in ALLOWED]
    assert not bad, bad


def test_every_exception_is_still_needed():
    assert set(ALLOWED) <= {(file, name) for file, name, _ in found_in_package()}


def test_the_walk_sees_the_package():
    seen = {str(path.relative_to(ROOT)) for folder in SOURCES for path in (ROOT / folder).rglob("*.py")}
    assert {"lightning_mappa/fit.py", "callbacks/weight_sync.py", "datamodules/rollout.py"} <= seen


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as json",
        "def f():\n    from pickle import loads as read",
        "from joblib import load",
        "import joblib.numpy_pickle",
        "import dill, os",
        "import shelve",
        "import_module('pickle').loads(data)",
        "__import__('cloudpickle')",
        "import torch\ntorch.load(file)",
        "import torch\ntorch.load(file, weights_only=False)",
        "import torch\ntorch.load(file, weights_only=flag)",
        "import torch as t\nt.load(file, map_location='cpu')",
        "from torch import load as read\nread(file)",
        "import numpy as np\nnp.load(file, allow_pickle=True)",
        "import numpy as np\nnp.load(file, None, True)",
        "import numpy as np\nnp.load(file, **options)",
        "from numpy import load\nload(file, allow_pickle=flag)",
        "import pandas as pd\npd.read_pickle(file)",
        "pandas.read_pickle",
        "eval(text)",
        "exec(text)",
        "import builtins\nbuiltins.exec(text)",
        "import subprocess\nsubprocess.run(text, shell=True)",
        "from os import system\nsystem(text)",
        "import os\nos.popen(text)",
        "import yaml\nyaml.load(text, yaml.Loader)",
    ],
)
def test_a_way_to_execute_is_found(source: str):
    assert list(violations(source))


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "import json\njson.loads(text)",
        "import torch\ntorch.load(file, weights_only=True)",
        "import numpy as np\nnp.load(file)",
        "import numpy as np\nnp.load(file, allow_pickle=False)",
        "import subprocess\nsubprocess.run(['ls'], shell=False)",
        "import yaml\nyaml.safe_load(text)",
        "from safetensors.torch import load_file\nload_file(path)",
        "import re\nre.compile('x')",
    ],
)
def test_harmless_code_is_left_alone(source: str):
    assert not list(violations(source))
