"""Programs that lay something down for whatever interpreter comes next, or change their own."""

from __future__ import annotations

import json

import pytest

from lightning_mappa.types import ToolStatus


def test_34_modules_left_behind_are_not_imported(run):
    assert run(
        """
        import os
        trap = "open('sprung', 'a').write(__name__)\\nraise SystemExit(9)\\n"
        os.makedirs("numpy", exist_ok=True)
        for name in (
            "sitecustomize.py", "usercustomize.py", "conftest.py", "random.py", "json.py", "pandas.py",
            "numpy/__init__.py", "encodings.py", "os.py", "site.py",
        ):
            open(name, "w").write(trap)
        """
    ).ok
    result = run("import random, json, os, numpy; print(random.random() < 1, json.dumps(1), os.path.exists('sprung'))")
    assert (result.status, result.stdout) == (ToolStatus.OK, "True 1 False\n"), result


def test_35_settings_left_behind_have_no_effect(run):
    before = run("import os; print(sorted(os.environ.items()))").stdout
    assert run(
        """
        import os, sys
        os.environ.update(LD_PRELOAD="/ws/trap.so", PYTHONSTARTUP="trap.py", PYTHONPATH=".", PYTHONHOME="/ws")
        trap = "import os; open(os.path.join(os.environ['HOME'], 'sprung'), 'w').close()\\n"
        packages = f".local/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
        os.makedirs(packages)
        names = [".bashrc", ".profile", ".pythonrc.py", "trap.py", "pyvenv.cfg"]
        for name in (*names, f"{packages}/usercustomize.py", f"{packages}/a.pth"):
            open(name, "w").write(trap)
        """
    ).ok
    assert run("import os; print(sorted(os.environ.items()))").stdout == before
    assert run("import os; print(os.path.exists('sprung'))").stdout == "False\n"


def test_36_what_it_patches_dies_with_it(run, harness):
    assert run(
        """
        import builtins, json, sys
        sys.settrace(lambda *_: None)
        class Finder:
            def find_spec(self, *_): raise SystemExit("hooked")
        sys.meta_path.insert(0, Finder())
        builtins.open = lambda *_: 1 / 0
        json.dumps = lambda *_: "1.0"
        """
    ).ok
    result = run("import json, sys; print(json.dumps([0.5]), sys.gettrace(), open(__file__).read(6))")
    assert (result.status, result.stdout) == (ToolStatus.OK, "[0.5] None import\n"), result
    assert json.dumps(harness.state()) != "1.0"


@pytest.mark.parametrize("name", ["torch_that_is_absent", "flash_attn", "cupy.cuda"])
def test_50_an_absent_package_is_the_programs_error(run, name):
    result = run(f"import {name}")
    assert (result.status, result.exit_code) == (ToolStatus.NONZERO, 1), result
    assert f"ModuleNotFoundError: No module named '{name.split('.')[0]}'" in result.stderr
