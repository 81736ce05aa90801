"""Demonstrations of a team on tables, with deliberate faults, for the warm start of the tiny table model.

Every program is one of a few, written for the task at hand: it names the task's targets and the forest of its kind. A
fault is a fixed alternative to a line, drawn for each program on its own.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.resources import files

from omegaconf import DictConfig, OmegaConf

from lightning_mappa.models.tiny_demos import Chat
from lightning_mappa.tables.source import Tables
from lightning_mappa.types import Task
from lightning_mappa.workflows.prompts import PromptTemplate, user_prompt

ROLES = ("engineer", "modeler", "analyst")
DEMO_SEED = 7_041_776
"""Of the tables that programs are demonstrated on. No run should have it, or it is tested on what it has seen."""

MISSING: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "engineer": ((),),
    "modeler": ((), (), ("X_train.pkl", "y_train.pkl")),
    "analyst": ((), (), ("X_test.pkl",), ("model.pkl",), ("model.pkl", "X_test.pkl")),
}
"""Role → what its inputs may lack; one of them is drawn for each program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFaults:
    """Share of programs with each fault; at most one fault per program."""

    engineer_forgets: float = 0.3
    """Does not save X_test.pkl."""
    engineer_leaks: float = 0.25
    """Fits the encoder on the rows to be predicted. The hand-in is valid all the same."""
    engineer_misnames: float = 0.1
    """Asks for a column called target, and stops."""
    modeler_kind: float = 0.25
    """Trains a classifier where numbers are to be predicted, or the other way round."""
    modeler_forgets: float = 0.2
    """Does not save model.pkl."""
    analyst_column: float = 0.25
    """Calls the predictions prediction."""
    analyst_index: float = 0.2
    """Writes row numbers as a column without a name."""


def engineer(task: Task, fault: str = "") -> str:
    """Encodes text columns by what the training rows hold, fills gaps, saves three files."""
    names = '"target"' if fault == "misnames" else _names(task)
    fitted_on = "Z" if fault == "leaks" else "X"
    saves_test = "" if fault == "forgets" else '\njoblib.dump(Z.fillna(0), "X_test.pkl")'
    return f"""\
import joblib, pandas as pd
from sklearn.preprocessing import OrdinalEncoder
train, test = pd.read_csv("train.csv"), pd.read_csv("test.csv")
y = train[[{names}]]
X, Z = train[test.columns[1:]], test[test.columns[1:]]
words = X.select_dtypes(exclude="number").columns
encoder = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1).fit({fitted_on}[words])
X[words], Z[words] = encoder.transform(X[words]), encoder.transform(Z[words])
joblib.dump(X.fillna(0), "X_train.pkl")
joblib.dump(y, "y_train.pkl"){saves_test}"""


def modeler(task: Task, fault: str = "") -> str:
    """A forest of the task's kind."""
    classifies = (task.metadata["type"] == "classification") != (fault == "kind")
    forest = "RandomForestClassifier" if classifies else "RandomForestRegressor"
    saves = "" if fault == "forgets" else '\njoblib.dump(model, "model.pkl")'
    return f"""\
import joblib
from sklearn.ensemble import {forest}
X, y = joblib.load("X_train.pkl"), joblib.load("y_train.pkl")
model = {forest}(n_estimators=20, random_state=0).fit(X, y){saves}"""


def analyst(task: Task, fault: str = "") -> str:
    """The ids of the rows to be predicted, and beside them what the model says."""
    names = '"prediction"' if fault == "column" else _names(task)
    options = "" if fault == "index" else ", index=False"
    return f"""\
import joblib, pandas as pd
model, Z = joblib.load("model.pkl"), joblib.load("X_test.pkl")
out = pd.read_csv("test.csv").iloc[:, :1]
out[[{names}]] = pd.DataFrame(model.predict(Z))
out.to_csv("submission.csv"{options})"""


PROGRAMS = {"engineer": engineer, "modeler": modeler, "analyst": analyst}


class TablePrompts:
    """The templates of `conf/prompts/tables.yaml`, rendered as the workflow renders them."""

    def __init__(self) -> None:
        source = files("lightning_mappa.conf") / "prompts" / "tables.yaml"
        config = OmegaConf.create(source.read_text(encoding="utf-8"))
        assert isinstance(config, DictConfig)
        self._user = {
            role: PromptTemplate(config[role].user, agent_id=role, key=f"prompts.{role}.user") for role in ROLES
        }
        self.max_new_tokens: Mapping[str, int] = config.max_new_tokens

    def opening(self, role: str, task: Task, missing: Sequence[str] = ()) -> Chat:
        """What an agent reads before its turn."""
        asked = user_prompt(self._user[role], task, (), {"missing": list(missing)})
        return [{"role": "user", "content": asked}]


def demo_tasks(count: int, seed: int = DEMO_SEED) -> Sequence[Task]:
    """Tasks on generated tables, kinds in turn. Their files are gone: only their texts are of use."""
    with closing(Tables(seed=seed, generated={"train": count, "selection": 1, "report": 1})) as source:
        return source.tasks("train")


def drawn_fault(role: str, rates: TableFaults, rng: random.Random) -> str:
    """A name that the role's program takes; empty for none."""
    shares = {
        name.removeprefix(f"{role}_"): getattr(rates, name)
        for name in TableFaults.__dataclass_fields__
        if name.startswith(f"{role}_")
    }
    return rng.choices(["", *shares], [1 - sum(shares.values()), *shares.values()])[0]


def fenced(program: str) -> str:
    return f"```python\n{program}\n```"


def demonstrate(task: Task, rates: TableFaults, rng: random.Random, prompts: TablePrompts) -> list[Chat]:
    """One chat per role, in the order of `ROLES`."""
    chats = []
    for role in ROLES:
        opening = prompts.opening(role, task, rng.choice(MISSING[role]))
        program = PROGRAMS[role](task, drawn_fault(role, rates, rng))
        chats.append([*opening, {"role": "assistant", "content": fenced(program)}])
    return chats


def _names(task: Task) -> str:
    return ", ".join(f'"{target}"' for target in task.metadata["targets"])
