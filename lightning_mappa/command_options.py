"""Options that one command reads and no run: they stand in every config, so that all have one schema."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class PlanConfig:
    """plan: the hardware that is planned for. None is what this machine has."""

    nodes: int = 1
    gpus_per_node: int | None = None
    gpu_memory_gb: float | None = None
    """GiB of one GPU."""
    node_memory_gb: float | None = None
    """GiB of host memory of one node."""
    task_tokens: int | None = None
    """The longest prompt of an episode's first action; None is 1024, or less where the context leaves less."""
    json: bool = False
    """The plan on stdout as JSON."""


@dataclass
class ExportConfig:
    """export: which weights of a run, and where to."""

    agent: str | None = None
    """None: every trained agent."""
    version: str | None = None
    """A policy version, `selected` or `last`; None is selected where a version was, else last."""
    to: str | None = None
    """A folder that gets one folder per agent; None is the run's own export/."""


@dataclass
class RecoachConfig:
    """recoach: what is asked anew of a recorded run, and what the report is called."""

    name: str | None = None
    """RUN/recoach-<name>.json; None: the coach's name and a hash of its config."""
    rescore: bool = False
    """Ask the coach also where its config is the run's own; what it says twice may differ."""
    max_steps: int | None = None
    """The first so many recorded steps; None: all."""
    update_steps: int = 1
    """Of so many first steps the policy gradients are compared; 0 loads no weights."""
