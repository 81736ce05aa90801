"""The tasks that come with this package: real data sets of scikit-learn, and generated tables with a fixed seed.

    python -m lightning_mappa.tables.shipped FOLDER

A process of its own, because only here is scikit-learn's data read.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_mappa.errors import ConfigError, InfrastructureError
from lightning_mappa.tables.build import Cell, Table, build_task
from lightning_mappa.tables.spec import TableSpec
from lightning_mappa.tables.synthetic import synthetic_table
from lightning_mappa.tasks.base import Split

_SEED = 20260

Shipped = tuple[Split, str, Table]
"""Its split, its kind and the table."""


def shipped_tables() -> Iterator[Shipped]:
    """Six of classification and six of regression: four and four to train on, one and one in each other split."""
    yield "train", "binary", _tumours()
    yield "train", "skewed", synthetic_table("shop-handling", "skewed", 11, field="orders", metric="rmsle")
    yield "train", "three_class", _wines()
    yield "train", "numbers", _diabetes()
    yield "train", "imbalanced", synthetic_table("machine-failures", "imbalanced", 12, field="machines", metric="f1")
    yield "train", "multi_target", synthetic_table("farm-harvest", "multi_target", 13, field="fields", metric="mcrmse")
    yield "train", "text_labels", synthetic_table("parcel-returns", "text_labels", 14, field="orders", metric="mcc")
    yield "train", "numbers", synthetic_table("bike-minutes", "numbers", 15, field="trips", metric="mae")
    yield "selection", "three_class", _irises()
    yield "selection", "skewed", synthetic_table("flat-rents", "skewed", 16, field="flats", metric="smape")
    yield "report", "ten_class", _digits()
    yield "report", "two_targets", synthetic_table("clinic-weeks", "two_targets", 17, field="patients", metric="rmse")


def build_shipped(folder: Path) -> None:
    """Writes all of them below `folder`, in a process that imports scikit-learn and ends.

    Raises:
        ConfigError: scikit-learn is not installed.
        InfrastructureError: the process failed.
    """
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", __name__ if __name__ != "__main__" else "lightning_mappa.tables.shipped", str(folder)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode == 0:
        return
    if "No module named 'sklearn'" in done.stderr:
        raise ConfigError("task: the shipped tables need scikit-learn; pip install 'lightning-mappa[tabular]'")
    raise InfrastructureError(f"task: the shipped tables were not written: {done.stderr.strip()[-300:]}")


def _bunch(loader: str) -> Any:
    from sklearn import datasets

    return getattr(datasets, loader)()


def _columns(bunch: Any, names: list[str] | None = None) -> dict[str, list[Cell]]:
    names = names or [str(name).replace(" ", "_").replace("_(cm)", "_cm") for name in bunch.feature_names]
    return {name: [float(value) for value in column] for name, column in zip(names, bunch.data.T, strict=True)}


def _tumours() -> Table:
    bunch = _bunch("load_breast_cancer")
    return Table(
        name="tumour-cells",
        about="Each row describes the cell nuclei of a breast tumour as measured in an image of a sample.",
        columns={**_columns(bunch), "malignant": [int(value == 0) for value in bunch.target]},
        spec=TableSpec(id_column="id", targets=("malignant",), metric="roc_auc"),
        meanings={"malignant": "1 where the tumour is malignant, else 0"},
    )


def _wines() -> Table:
    bunch = _bunch("load_wine")
    names = [name.replace("/", "_") for name in bunch.feature_names]
    return Table(
        name="wine-growers",
        about="Each row is the chemical analysis of a wine from one of three growers in one region.",
        columns={**_columns(bunch, names), "grower": [int(value) for value in bunch.target]},
        spec=TableSpec(id_column="Id", targets=("grower",), metric="accuracy"),
        meanings={"grower": "0, 1 or 2"},
    )


def _irises() -> Table:
    bunch = _bunch("load_iris")
    species: list[Cell] = [str(bunch.target_names[value]) for value in bunch.target]
    return Table(
        name="iris-species",
        about="Each row is an iris, measured in the field.",
        columns={**_columns(bunch), "species": species},
        spec=TableSpec(id_column="flower_id", targets=("species",), metric="f1_macro"),
        meanings={"species": "setosa, versicolor or virginica"},
    )


def _digits() -> Table:
    bunch = _bunch("load_digits")
    rows = slice(0, 700)
    columns = {
        f"pixel_{place // 8}_{place % 8}": [int(value) for value in bunch.data[rows, place]] for place in range(64)
    }
    return Table(
        name="digit-images",
        about="Each row is a handwritten digit as an image of 8 by 8 pixels with 17 grey levels.",
        columns={**columns, "digit": [int(value) for value in bunch.target[rows]]},
        spec=TableSpec(id_column="image", targets=("digit",), metric="accuracy"),
        meanings={"digit": "0 to 9"},
    )


def _diabetes() -> Table:
    from sklearn import datasets

    bunch = datasets.load_diabetes(scaled=False)
    names = ["age", "sex", "bmi", "blood_pressure", "tc", "ldl", "hdl", "tch", "ltg", "glucose"]
    return Table(
        name="diabetes-progress",
        about="Each row is a patient with diabetes, examined at the start of a year.",
        columns={**_columns(bunch, names), "progression": [float(value) for value in bunch.target]},
        spec=TableSpec(id_column="patient", targets=("progression",), metric="rmse"),
        meanings={"progression": "how far the illness has gone on after one year"},
    )


if __name__ == "__main__":
    for split, kind, table in shipped_tables():
        build_task(Path(sys.argv[1]), table, seed=_SEED, split=split, kind=kind)
