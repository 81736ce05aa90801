"""A plan for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from lightning_mappa.plan.memory import GIB

if TYPE_CHECKING:
    from lightning_mappa.plan.devices import Device
    from lightning_mappa.plan.plan import RunPlan


def as_data(plan: RunPlan) -> dict[str, Any]:
    """Plain values, sizes in bytes."""
    batches = plan.batches
    return {
        "possible": not plan.problems,
        "problems": list(plan.problems),
        "notes": list(plan.notes),
        "processes": [
            {"owner": one.owner, "node": one.node, "gpu": one.gpu, "share": one.share} for one in plan.processes
        ],
        "batch": {
            "prompts": batches.prompts,
            "samples_per_prompt": batches.samples_per_prompt,
            "episodes": batches.episodes,
            "agents": {agent_id: asdict(one) for agent_id, one in batches.agents.items()},
        },
        "total": {
            "steps": batches.steps,
            "episodes": batches.total_episodes,
            "actions": batches.total_actions,
            "optimizer_steps": batches.optimizer_steps,
            "evaluations": batches.evaluations,
        },
        "agents": {
            agent.agent_id: {
                "roles": [asdict(one) for one in agent.roles],
                "model": agent.model,
                "parameters": agent.facts.parameters,
                "trained_parameters": 0 if agent.shape is None else agent.shape.trained,
                "context_length": agent.context_length,
                "longest_sequence": agent.longest,
                "sync_bytes": agent.sync_bytes,
            }
            for agent in plan.agents
        },
        "memory": [
            {
                "device": device.name,
                "capacity": device.capacity,
                "peak": device.peak,
                "always": device.always,
                "update": device.update,
                "rollout": device.rollout,
                "parts": [asdict(holding) for holding in device.holdings],
            }
            for device in plan.devices
        ],
        "kv_caches": [{**asdict(cache), "group": list(cache.group), "tokens": cache.tokens} for cache in plan.caches],
        "weight_sync_bytes_per_step": plan.sync_bytes,
        "coach": [asdict(bill) for bill in plan.bills],
    }


def show(plan: RunPlan, console: Console) -> None:
    console.print(_placement(plan))
    console.print(_batches(plan))
    for agent in plan.agents:
        if len(agent.roles) > 1:
            console.print(f"the weights of {agent.agent_id} act as {', '.join(one.role for one in agent.roles)}")
    console.print(_memory(plan))
    for alike in _alike(plan.devices):
        console.print(_parts(alike))
    batches = plan.batches
    console.print(
        f"in all: {batches.steps} rollout steps, {batches.total_episodes:,} episodes, at most "
        f"{batches.total_actions:,} actions and {batches.optimizer_steps:,} optimizer steps; {batches.evaluations} "
        f"evaluations, which {'no' if batches.judged_in_evaluations == 0 else 'the'} coach scores"
    )
    for cache in plan.caches:
        console.print(
            f"KV cache of {', '.join(cache.group)}: {cache.tokens:,} tokens; one sequence has at most "
            f"{cache.longest_context:,}"
        )
    console.print(f"weight sync: {_size(plan.sync_bytes)} per step")
    console.print(*_coach(plan), *(f"note: {note}" for note in plan.notes), sep="\n")


def _placement(plan: RunPlan) -> Table:
    table = Table("where", "what", "share", title="placement", title_justify="left")
    for one in sorted(plan.processes, key=lambda p: (p.node, p.gpu if p.gpu is not None else -1)):
        where = f"node {one.node}, " + ("CPU" if one.gpu is None else f"GPU {one.gpu}")
        table.add_row(where, one.owner, "" if one.gpu is None else f"{one.share:g}")
    return table


def _batches(plan: RunPlan) -> Table:
    batches = plan.batches
    title = f"a step: {batches.prompts} tasks x {batches.samples_per_prompt} samples = {batches.episodes} episodes"
    table = Table(
        *("agent", "parameters", "trained", "turns", "actions", "optimizer steps", "forwards/rank", "tokens"),
        title=f"{title}; each agent at most",
        title_justify="left",
    )
    for agent in plan.agents:
        one = agent.batch
        trained = "frozen" if agent.shape is None else f"{agent.shape.trained / 1e6:,.1f} M"
        figures = (one.turns, one.actions, one.mini_batches, one.forwards_per_rank, agent.longest)
        table.add_row(
            agent.agent_id, f"{agent.facts.parameters / 1e6:,.1f} M", trained, *(f"{figure:,}" for figure in figures)
        )
    return table


def _memory(plan: RunPlan) -> Table:
    columns = ("device", "always", "+ update", "+ rollout", "peak", "has")
    table = Table(*columns, title="memory, GiB", title_justify="left")
    for device in plan.devices:
        sizes = (device.always, device.update, device.rollout, device.peak, device.capacity)
        style = None if device.fits else "bold red"
        table.add_row(device.name, *(f"{size / GIB:.2f}" for size in sizes), style=style)
    return table


def _alike(devices: Sequence[Device]) -> list[list[Device]]:
    """Devices that hold the same parts, whoever's they are."""
    groups: dict[tuple[tuple[str, int], ...], list[Device]] = {}
    for device in devices:
        groups.setdefault(tuple(sorted((one.part, one.bytes) for one in device.holdings)), []).append(device)
    return list(groups.values())


def _parts(devices: Sequence[Device]) -> Table:
    """What lies on each of these devices, which are alike; what several processes hold is one line."""
    more = f" and {len(devices) - 1} more like it" if len(devices) > 1 else ""
    table = Table("part", "when", "processes", "GiB each", title=f"{devices[0].name}{more}", title_justify="left")
    lines: dict[tuple[str, str, int], int] = {}
    for one in devices[0].holdings:
        lines[one.part, one.when, one.bytes] = lines.get((one.part, one.when, one.bytes), 0) + 1
    for (part, when, n_bytes), count in lines.items():
        table.add_row(part, when, str(count), f"{n_bytes / GIB:.3f}")
    return table


def _coach(plan: RunPlan) -> list[str]:
    if not plan.bills:
        return ["coach: asks no model, costs nothing"]
    lines = []
    for bill in plan.bills:
        price = "unknown price" if bill.usd is None else f"about ${bill.usd:,.2f} at most"
        cap = "no cap" if bill.budget_usd is None else f"the run stops at ${bill.budget_usd:,.2f}"
        lines.append(
            f"coach {bill.model}: at most {bill.calls:,} calls, {bill.input_tokens:,} tokens in and "
            f"{bill.output_tokens:,} out; {price}; {cap}"
        )
    return lines


def _size(n_bytes: int) -> str:
    if n_bytes >= GIB / 10:
        return f"{n_bytes / GIB:.2f} GiB"
    return f"{n_bytes / 2**20:.2f} MiB"
