"""The parts of a team on tables, as they go and as they fail, in words and sizes that chance picks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_mappa.audit.lines import block
from lightning_mappa.audit.table_cases import MAKES, Ending, Step
from lightning_mappa.types import ToolStatus

_CODE = {
    "X_train.pkl": 'joblib.dump(both[: len(train)], "X_train.pkl")',
    "y_train.pkl": 'joblib.dump(y, "y_train.pkl")',
    "X_test.pkl": 'joblib.dump(both[len(train) :], "X_test.pkl")',
}
HEAD = {
    "engineer": "import joblib\nimport pandas as pd\ntrain, test = pd.read_csv('train.csv'), pd.read_csv('test.csv')\n"
    "y = train.iloc[:, -1]\nboth = pd.get_dummies(pd.concat([train.iloc[:, :-1], test])).fillna(0)",
    "modeler": "import joblib\nfrom sklearn.ensemble import RandomForestClassifier\n"
    "X, y = joblib.load('X_train.pkl'), joblib.load('y_train.pkl')\nmodel = RandomForestClassifier().fit(X, y)",
    "analyst": "import joblib\nimport pandas as pd\nmodel, X = joblib.load('model.pkl'), joblib.load('X_test.pkl')\n"
    "out = pd.read_csv('sample_submission.csv')\nout.iloc[:, 1] = model.predict(X)",
}
_SAVE = {
    "modeler": 'joblib.dump(model, "model.pkl")',
    "analyst": 'out.to_csv("submission.csv", index=False)',
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """What chance adds to a template, and the parts that go as they should."""

    rng: random.Random

    def part(self, agent_id: str, *, faulty: bool = False) -> list[Step]:
        """A program that leaves all files of the part behind, and a summary."""
        return [self.saves(agent_id, MAKES[agent_id], faulty=faulty), self.says(agent_id)]

    def saves(self, agent_id: str, paths: Sequence[str], *, faulty: bool = False, before: str = "") -> Step:
        """A program that ends well and leaves `paths` behind."""
        files = {path: self.rng.randrange(800, 900_000) for path in paths}
        return Step(
            agent_id=agent_id,
            text=block(before + program(agent_id, paths)),
            status=ToolStatus.OK,
            stdout=self.rng.choice(["done\n", f"rows: {self.rng.randrange(200, 900)}\n", "summary follows\n"]),
            files=files,
            faulty=faulty,
        )

    def fails(
        self,
        agent_id: str,
        error: str,
        *,
        status: ToolStatus = ToolStatus.NONZERO,
        faulty: bool = False,
        body: str | None = None,
    ) -> Step:
        """A program that leaves nothing behind."""
        trace = f'Traceback (most recent call last):\n  File "main.py", line 4, in <module>\n{error}\n' if error else ""
        text = block(program(agent_id, MAKES[agent_id]) if body is None else body)
        return Step(agent_id=agent_id, text=text, status=status, stderr=trace, faulty=faulty)

    def misses(self, agent_id: str, path: str) -> list[Step]:
        """The part of an agent that finds a file missing, through no fault of its own."""
        error = f"FileNotFoundError: [Errno 2] No such file or directory: '{path}'"
        return [self.fails(agent_id, error), self.says_failed(agent_id)]

    def says(self, agent_id: str) -> Step:
        made = ", ".join(MAKES[agent_id])
        text = self.rng.choice(
            [f"All files are saved: {made}.", f"My part is done. {made} can be used.", f"Saved {made}."]
        )
        return Step(agent_id=agent_id, text=text)

    def says_failed(self, agent_id: str) -> Step:
        text = self.rng.choice(
            ["My program failed, so I leave no files.", "I could not do my part: the program failed."]
        )
        return Step(agent_id=agent_id, text=text)

    def good(self) -> Ending:
        accuracy = round(self.rng.uniform(0.86, 0.97), 3)
        return Ending(metrics={"score": accuracy, "accuracy": accuracy})


def program(agent_id: str, paths: Sequence[str]) -> str:
    lines = [_CODE[path] for path in paths if path in _CODE]
    if agent_id in _SAVE and set(paths) & set(MAKES[agent_id]):
        lines.append(_SAVE[agent_id])
    return "\n".join([HEAD[agent_id], *lines, "print('done')"])
