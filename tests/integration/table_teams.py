"""Scripted teams on tables: one that does everything right, and teams in which one step goes wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_mappa.types import Task

Script = Mapping[str, Sequence[str]]
"""Agent id → what it writes, turn by turn."""

SUMMARY = "All files are saved."


def block(code: str, words: str = "Here is the program.") -> str:
    return f"{words}\n```python\n{code.strip()}\n```"


def engineer(task: Task, *, saves: Sequence[str] = ("X_train", "y_train", "X_test"), y: str = "train[targets]") -> str:
    names = {"X_train": "both[: len(train)]", "y_train": "y", "X_test": "both[len(train) :]"}
    saving = "\n".join(f'joblib.dump({names[name]}, "{name}.pkl")' for name in saves)
    meta = task.metadata
    return f"""
import joblib
import pandas as pd
train, test = pd.read_csv("train.csv"), pd.read_csv("test.csv")
targets = {meta["targets"]}
y = {y}
both = pd.concat([train, test]).drop(columns=["{meta["id_column"]}", *targets])
for name in both.columns:
    if both[name].dropna().astype(str).str.match("^2023-").all():
        both[name] = pd.to_datetime(both[name]).dt.dayofyear
both = pd.get_dummies(both).astype(float)
both = both.fillna(both[: len(train)].mean())
print("PREPROCESSING SUMMARY", both.shape)
{saving}
"""


def modeler(task: Task, *, save: str = 'joblib.dump(model, "model.pkl")', options: str = "random_state=0") -> str:
    name = "RandomForestClassifier" if task.metadata["type"] == "classification" else "RandomForestRegressor"
    return f"""
import joblib
from sklearn.ensemble import {name}
X, y = joblib.load("X_train.pkl"), joblib.load("y_train.pkl")
y = y.iloc[:, 0] if y.shape[1] == 1 else y
model = {name}(n_estimators=40, {options}).fit(X, y)
{save}
print("MODEL SUMMARY", model.score(X, y))
"""


def analyst(task: Task, *, then: str = "", predict: str = "model.predict(X)", write: str = "") -> str:
    meta = task.metadata
    write = write or 'out.to_csv("submission.csv", index=False)'
    return f"""
import joblib
import pandas as pd
test = pd.read_csv("test.csv")
model, X = joblib.load("model.pkl"), joblib.load("X_test.pkl")
predicted = pd.DataFrame({predict})
out = pd.DataFrame({{"{meta["id_column"]}": test["{meta["id_column"]}"]}})
for place, target in enumerate({meta["targets"]}):
    out[target] = predicted[place]
{then}
{write}
print(out.head(2))
"""


def perfect(task: Task) -> dict[str, list[str]]:
    return {
        "engineer": [block(engineer(task)), SUMMARY],
        "modeler": [block(modeler(task)), SUMMARY],
        "analyst": [block(analyst(task)), SUMMARY],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """One fault: what the guilty agent writes instead, and what has to come of it."""

    name: str
    guilty: str
    """Agent id; it must have the lowest score of all."""
    fault: str
    """Of the episode; empty where the hand-in is valid all the same."""
    turns: Sequence[str]
    stopped: Sequence[str] = field(default=())
    """Agents that fall over the fault and must get 3 to 5."""


def planted(task: Task) -> list[Planted]:
    """`task` is one of classification with text labels."""
    target = task.metadata["targets"][0]

    def writes(name: str, fault: str, **changes: str) -> Planted:
        return Planted(name=name, guilty="analyst", fault=fault, turns=[block(analyst(task, **changes)), SUMMARY])

    def prepares(name: str, code: str, stopped: Sequence[str]) -> Planted:
        return Planted(name=name, guilty="engineer", fault="missing", turns=[block(code), SUMMARY], stopped=stopped)

    def trains(name: str, code: str) -> Planted:
        turns = [block(code), SUMMARY]
        return Planted(name=name, guilty="modeler", fault="missing", turns=turns, stopped=["analyst"])

    without_test = engineer(task, saves=("X_train", "y_train"))
    return [
        prepares("forgets X_test.pkl", without_test, ["analyst"]),
        prepares("leaves X_test.pkl empty", f'{without_test}\nopen("X_test.pkl", "w")', ["analyst"]),
        prepares("program stops", engineer(task).replace("targets = ", "target = "), ["modeler", "analyst"]),
        prepares(
            "saves in another folder",
            f'import os\nos.mkdir("out"); os.chdir("out")\n{engineer(task)}'.replace(
                '"train.csv"', '"../train.csv"'
            ).replace('"test.csv"', '"../test.csv"'),
            ["modeler", "analyst"],
        ),
        Planted(
            name="writes no code",
            guilty="engineer",
            fault="missing",
            turns=["I would scale the columns."],
            stopped=["modeler", "analyst"],
        ),
        trains("forgets model.pkl", modeler(task, save="pass")),
        trains("wrong option", modeler(task, options="depth=3")),
        trains("runs for ever", modeler(task, save="while True: pass")),
        Planted(
            name="removes X_test.pkl",
            guilty="modeler",
            fault="missing",
            stopped=["analyst"],
            turns=[block(modeler(task) + '\nimport os\nos.remove("X_test.pkl")'), SUMMARY],
        ),
        Planted(name="only talks of it", guilty="analyst", fault="missing", turns=[SUMMARY]),
        writes("prints and does not save", "missing", write="pass"),
        writes(
            "column of another name", "missing_column", then=f'out = out.rename(columns={{"{target}": "prediction"}})'
        ),
        writes("row numbers as a column", "extra_column", write='out.to_csv("submission.csv")'),
        writes("first rows only", "missing_id", then="out = out.head(5)"),
        writes(
            "training rows too",
            "extra_id",
            then="""
more = pd.read_csv("train.csv")[[*out.columns]]
out = pd.concat([out, more])""",
        ),
        writes("a row twice", "duplicate_key", then="out = pd.concat([out, out.head(1)])"),
        writes(
            "codes in place of labels",
            "unknown_label",
            then=f'out["{target}"] = out["{target}"].astype("category").cat.codes',
        ),
        writes("gaps", "unknown_label", then=f'out.loc[3, "{target}"] = None'),
        writes("semicolons", "separator", write='out.to_csv("submission.csv", index=False, sep=";")'),
        writes(
            "hands in the sample", "", write='open("submission.csv", "w").write(open("sample_submission.csv").read())'
        ),
    ]
