"""The place that `runtime` names."""

from __future__ import annotations

from omegaconf import DictConfig

from lightning_mappa.runtime.base import Place


def place_for(cfg: DictConfig) -> Place:
    """Loads what serves the agents; `Place.prepare` then makes what trains them."""
    if cfg.runtime.name == "ray":
        from lightning_mappa.runtime.ray_place import RayPlace

        return RayPlace(cfg)
    from lightning_mappa.runtime.local import LocalPlace

    return LocalPlace(cfg)
