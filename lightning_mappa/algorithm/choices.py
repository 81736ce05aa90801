"""Options that take a name: what is allowed, and what is documented but not built."""

from __future__ import annotations

from collections.abc import Collection

from lightning_mappa.errors import ConfigError, NotAvailableError


def check_choice(key: str, value: object, allowed: Collection[str], *, later: Collection[str] = ()) -> None:
    """Raises `NotAvailableError` for a value in `later`, `ConfigError` for any other one not in `allowed`."""
    listed = ", ".join(allowed)
    if value in later:
        raise NotAvailableError(f"{key}={value} is not available in this version; allowed: {listed}")
    if value not in allowed:
        raise ConfigError(f"{key} is {value!r}; allowed: {listed}")
