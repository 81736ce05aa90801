"""Tests that need an optional package: skipped where it is not installed, failed where it has to be."""

from __future__ import annotations

import importlib.util
import os

import pytest

REQUIRED = frozenset(os.environ.get("MAPPA_TEST_PACKAGES", "").split())
"""Packages whose absence is a failure: CI names them in the environment that has them."""


def needs(*packages: str) -> pytest.MarkDecorator:
    """A mark that skips with a reason when one of `packages` is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if demanded := REQUIRED.intersection(missing):
        raise RuntimeError(f"MAPPA_TEST_PACKAGES demands {', '.join(sorted(demanded))}, which is not installed")
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}: see the README's install part")
