"""Tables from a seed: invented fields, whose columns say enough about the target for a plain model to find it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta

import numpy as np
from numpy.typing import NDArray

from lightning_mappa.seeds import derive_seed
from lightning_mappa.tables.build import Cell, Table
from lightning_mappa.tables.spec import TableSpec

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A part of the world that tables can be drawn from."""

    name: str
    about: str
    numbers: Mapping[str, tuple[float, float]]
    """Column → mean and standard deviation."""
    categories: Mapping[str, Sequence[str]]
    day: str
    """Name of a column of dates."""
    classes: tuple[str, tuple[str, str, str]]
    """A target column and its classes, of which binary tasks use the first and the last."""
    amounts: tuple[str, str, str]
    """Target columns of numbers."""


# fmt: off
FIELDS: tuple[Field, ...] = (
    Field(name="flats", about="Each row is a flat that was offered for rent in a city.",
          numbers={"area_m2": (70, 22), "floor": (4, 2), "km_to_centre": (6, 3), "age_years": (35, 18),
                   "windows": (6, 2)},
          categories={"district": ("harbour", "hill", "north", "park"), "heating": ("gas", "grid", "wood")},
          day="listed_on", classes=("demand", ("low", "middle", "high")), amounts=("rent", "deposit", "charges")),
    Field(name="orders", about="Each row is an order in a shop that sends parcels.",
          numbers={"basket_value": (80, 30), "items": (5, 2), "distance_km": (300, 120), "weight_kg": (4, 1.5),
                   "visits": (9, 4)},
          categories={"channel": ("app", "phone", "web"), "payment": ("card", "invoice", "transfer", "wallet")},
          day="ordered_on", classes=("outcome", ("kept", "exchanged", "returned")),
          amounts=("shipping_cost", "handling_minutes", "margin")),
    Field(name="machines", about="Each row is one shift of a machine in a workshop.",
          numbers={"load": (60, 15), "speed_rpm": (1500, 300), "oil_temp": (70, 9), "hours_since_service": (400, 150),
                   "vibration": (3, 0.8)},
          categories={"line": ("a1", "a2", "b1"), "material": ("brass", "iron", "steel")},
          day="shift_day", classes=("state", ("fine", "worn", "failing")),
          amounts=("wear", "energy_kwh", "scrap")),
    Field(name="fields", about="Each row is a field of a farm in one season.",
          numbers={"rain_mm": (500, 110), "soil_ph": (6.5, 0.5), "nitrogen": (40, 12), "slope": (5, 2),
                   "sun_hours": (1600, 200)},
          categories={"crop": ("barley", "maize", "oats", "rye"), "soil": ("clay", "loam", "sand")},
          day="sown_on", classes=("grade", ("poor", "fair", "good")), amounts=("yield_t", "protein", "water_use")),
    Field(name="trips", about="Each row is a trip with a hired bicycle.",
          numbers={"km": (4, 1.4), "climb_m": (40, 20), "wind": (12, 5), "temperature": (15, 7), "battery": (70, 15)},
          categories={"station": ("bridge", "market", "school", "station"), "bike": ("cargo", "city", "electric")},
          day="day", classes=("rating", ("bad", "okay", "great")), amounts=("minutes", "fare", "effort")),
    Field(name="patients", about="Each row is a visit to a practice for physiotherapy.",
          numbers={"age": (50, 14), "pain": (5, 1.8), "sessions": (7, 3), "sleep_hours": (7, 1), "steps": (6000, 2000)},
          categories={"area": ("back", "hip", "knee", "neck"), "referral": ("doctor", "friend", "self")},
          day="seen_on", classes=("progress", ("none", "some", "full")), amounts=("weeks", "cost", "mobility")),
)
# fmt: on

KINDS: Mapping[str, tuple[str, ...]] = {
    "binary": ("roc_auc", "accuracy", "log_loss"),
    "skewed": ("rmsle", "smape"),
    "three_class": ("accuracy", "f1_macro"),
    "multi_target": ("mcrmse", "mae"),
    "imbalanced": ("f1", "roc_auc"),
    "numbers": ("rmse", "mae", "r2"),
    "text_labels": ("mcc", "f1"),
    "two_targets": ("rmse", "mcrmse"),
}
"""Classification and regression take turns; the metrics that a kind may be scored by."""


def generated_tables(seed: int, group: str, count: int) -> list[Table]:
    """Tables of all kinds in turn, named by `group` and number; other groups and seeds give other tables."""
    kinds = list(KINDS)
    return [
        synthetic_table(f"{group}-{number:03d}", kinds[number % len(kinds)], derive_seed("tables", seed, group, number))
        for number in range(count)
    ]


def kind_of(number: int) -> str:
    """The kind of a table of `generated_tables` by its number in the group."""
    return list(KINDS)[number % len(KINDS)]


def synthetic_table(name: str, kind: str, seed: int, *, field: str | None = None, metric: str | None = None) -> Table:
    """One table of a kind in `KINDS`: numbers, categories, dates and gaps, about a fifth of the target noise.

    Args:
        field: a name in `FIELDS`; None draws one.
        metric: None draws one of the kind's.
    """
    rng = random.Random(seed)
    world = rng.choice(FIELDS) if field is None else next(f for f in FIELDS if f.name == field)
    metric = metric or rng.choice(KINDS[kind])
    draws = np.random.default_rng(seed)
    n_rows = rng.randint(220, 320)
    columns, parts = _features(world, n_rows, rng, draws)
    targets = _targets(world, kind, [_signal(parts, draws) for _ in range(3)], metric)
    return Table(
        name=name,
        about=world.about,
        columns={**columns, **targets},
        spec=TableSpec(id_column=rng.choice(("id", "row_id", "Id")), targets=tuple(targets), metric=metric),
    )


def _features(
    world: Field, n: int, rng: random.Random, draws: np.random.Generator
) -> tuple[dict[str, list[Cell]], list[Floats]]:
    """Columns as they are written, and for each what of it can bear on a target, at a spread of about 1."""
    columns: dict[str, list[Cell]] = {}
    parts: list[Floats] = []
    for name in rng.sample(sorted(world.numbers), 4):
        mean, spread = world.numbers[name]
        standard = draws.standard_normal(n)
        columns[name] = [round(float(value), 2) for value in mean + spread * standard]
        parts.append(standard)
    for name in sorted(world.categories):
        levels = world.categories[name]
        drawn = draws.integers(0, len(levels), n)
        columns[name] = [levels[place] for place in drawn]
        parts.append(draws.permutation(np.linspace(-1.2, 1.2, len(levels)))[drawn])
    if rng.random() < 0.6:
        days = draws.integers(0, 365, n)
        columns[world.day] = [str(date(2023, 1, 1) + timedelta(days=int(day))) for day in days]
        parts.append(1.2 * np.sin(2 * np.pi * days / 365))
    for name in rng.sample(sorted(columns), 2):
        if name != world.day:
            gone = draws.random(n) < 0.06
            columns[name] = [None if gap else cell for cell, gap in zip(columns[name], gone, strict=True)]
    return columns, parts


def _signal(parts: Sequence[Floats], draws: np.random.Generator) -> Floats:
    """A target before it has a scale: mean 0, spread 1, a sum of all parts, one product of two, and noise."""
    weights = draws.uniform(0.6, 1.4, len(parts)) * draws.choice([-1.0, 1.0], len(parts))
    known = sum((w * part for w, part in zip(weights, parts, strict=True)), np.zeros(len(parts[0])))
    known = known + 0.5 * parts[0] * parts[1]
    signal = known / known.std() + 0.4 * draws.standard_normal(len(known))
    return np.asarray((signal - signal.mean()) / signal.std())


def _targets(world: Field, kind: str, signals: Sequence[Floats], metric: str) -> dict[str, list[Cell]]:
    column, classes = world.classes
    first = signals[0]
    if kind in ("binary", "imbalanced"):
        share = 0.5 if kind == "binary" else 0.12
        return {f"is_{classes[-1]}": [int(hit) for hit in first > np.quantile(first, 1 - share)]}
    if kind == "text_labels":
        return {column: [classes[-1] if hit else classes[0] for hit in first > np.quantile(first, 0.55)]}
    if kind == "three_class":
        places = np.digitize(first, np.quantile(first, [0.4, 0.75]))
        return {column: [classes[place] for place in places]}
    if kind == "skewed":
        return {world.amounts[0]: [round(float(value), 2) for value in 40 * np.exp(0.9 * first)]}
    count = {"numbers": 1, "two_targets": 2, "multi_target": 3}[kind]
    scales = (50.0, 10.0, 400.0)
    return {
        name: [round(float(value), 3) for value in scale * (5 + signal)]
        for name, scale, signal in zip(world.amounts[:count], scales, signals, strict=False)
    }
