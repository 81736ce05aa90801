"""Where this interpreter lies, of which a program sees no more than it needs to run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def interpreter_paths() -> list[str]:
    """Programs and libraries of this interpreter and its virtual environment, outer folders first.

    Never a whole prefix: a virtual environment made in a project's folder has the project beside it.
    """
    prefixes = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    prefixes |= {os.path.realpath(prefix) for prefix in prefixes}
    paths = (os.path.join(prefix, part) for prefix in prefixes for part in ("bin", "lib", "lib64", "pyvenv.cfg"))
    return sorted(path for path in paths if os.path.exists(path) and not path.startswith("/usr/"))
