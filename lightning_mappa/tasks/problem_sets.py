"""Where problems come from: a file, a set shipped with the package, or the Hugging Face hub."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from lightning_mappa.errors import ConfigError
from lightning_mappa.files import write_json
from lightning_mappa.metrics import FIXTURE
from lightning_mappa.tasks.json_rows import read_rows
from lightning_mappa.tasks.problem_formats import Problem, read_problem
from lightning_mappa.tasks.strata import draw

FIXTURES = Path(__file__).with_name("fixtures")


class ProblemSet(Protocol):
    """One split's problems, all of them; `limit` and `indices` say which are used."""

    format: str
    limit: int | None
    indices: str | None

    def problems(self) -> Sequence[Problem]:
        """In the order of the source. Raises `ConfigError` that names the row."""
        ...

    @property
    def name(self) -> str:
        """In one word, for task ids and errors."""
        ...


class ProblemFile:
    """A JSON array or JSON lines in one of the formats of `problem_formats`.

    Args:
        path: the file; `fixture/aime`, `fixture/amc`, `fixture/math` and `fixture/gsm8k` are examples that come
            with the package, written for it, and every figure over them says `fixture/`.
        limit: use so many problems, drawn with the task's seed; None uses all.
        indices: a file for the places of the drawn problems. Where it is, they are read from it; else it is written.
    """

    def __init__(self, path: str, format: str, limit: int | None = None, indices: str | None = None) -> None:
        self.path = path
        self.format = format
        self.limit = checked_limit(limit)
        self.indices = indices

    @property
    def name(self) -> str:
        return self.path if self.path.startswith(FIXTURE) else Path(self.path).stem

    def problems(self) -> Sequence[Problem]:
        shipped = self.path.startswith(FIXTURE)
        if shipped and not (FIXTURES / f"{self.path.removeprefix(FIXTURE)}.jsonl").is_file():
            known = ", ".join(FIXTURE + path.stem for path in sorted(FIXTURES.glob("*.jsonl")))
            raise ConfigError(f"path={self.path}: no such example; allowed are {known}")
        path = FIXTURES / f"{self.path.removeprefix(FIXTURE)}.jsonl" if shipped else Path(self.path).expanduser()
        return read_all(read_rows(path, "path"), self.format, f"path={self.path}", FIXTURE if shipped else "")


class HubSet:
    """A data set of the Hugging Face hub, by the `datasets` library.

    Without it, or where the hub cannot be reached, the same rows as JSON lines in `folder` take its place: a
    file `OWNER__NAME__SPLIT.jsonl`, which is read first wherever it lies.

    Args:
        repo: `owner/name`.
        split: as the hub names it.
        config: of a data set with several.
        revision: a commit, so that the data cannot change under a run.
        folder: where files in place of downloads lie.
        limit, indices: as for `ProblemFile`.
    """

    def __init__(
        self,
        repo: str,
        format: str,
        split: str = "train",
        config: str | None = None,
        revision: str | None = None,
        folder: str = "data",
        limit: int | None = None,
        indices: str | None = None,
    ) -> None:
        self.repo, self.split, self.config, self.revision = repo, split, config, revision
        self.format = format
        self.limit = checked_limit(limit)
        self.indices = indices
        parts = [repo.replace("/", "__"), *([config] if config else []), split]
        self.place = Path(folder).expanduser() / f"{'__'.join(parts)}.jsonl"

    @property
    def name(self) -> str:
        return self.place.stem

    def problems(self) -> Sequence[Problem]:
        if self.place.is_file():
            return read_all(read_rows(self.place, "file"), self.format, f"file={self.place}")
        rows = enumerate(self._download(), start=1)
        return read_all(((f"row {number}", row) for number, row in rows), self.format, f"repo={self.repo}")

    def _download(self) -> Iterable[Any]:
        try:
            library = importlib.import_module("datasets")
        except ModuleNotFoundError:
            raise self._absent("it needs pip install 'lightning-mappa[data]'") from None
        try:
            loaded: Iterable[Any] = library.load_dataset(
                self.repo, self.config, split=self.split, revision=self.revision
            )
        except Exception as error:  # the library, its file formats and its network raise anything
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise self._absent(reason[:300]) from error
        return loaded

    def _absent(self, reason: str) -> ConfigError:
        revision = f" at revision {self.revision}" if self.revision else ""
        return ConfigError(
            f"repo={self.repo}: its split {self.split}{revision} cannot be loaded from the Hugging Face hub ({reason});"
            f" without a hub, place that split as JSON lines at {self.place.absolute()}"
        )


def used_problems(source: ProblemSet, *, seed: int) -> list[Problem]:
    """The problems a run uses of a set: all, those drawn with `seed`, or those that `indices` names.

    Raises `ConfigError` where `limit` is more than there is, or the file of indices was written for other data.
    """
    problems = source.problems()
    if source.limit is not None and source.limit > len(problems):
        raise ConfigError(f"limit={source.limit}: {source.name} holds {len(problems)} problems")
    digest = _digest(problems)
    if source.indices is not None and Path(source.indices).exists():
        chosen = _read_indices(Path(source.indices), digest, len(problems), source.limit)
    else:
        limit = len(problems) if source.limit is None else source.limit
        chosen = draw([problem.stratum for problem in problems], limit, seed=seed)
        if source.indices is not None:
            Path(source.indices).absolute().parent.mkdir(parents=True, exist_ok=True)
            record = {"source": source.name, "sha256": digest, "seed": seed, "indices": chosen}
            write_json(Path(source.indices), record)
    return [problems[index] for index in chosen]


def read_all(rows: Iterable[tuple[str, Any]], format: str, where: str, prefix: str = "") -> list[Problem]:
    """Every row as a problem of its format, each text and id once. Raises `ConfigError` that names the row."""
    problems: list[Problem] = []
    seen: dict[str, str] = {}
    for place, row in rows:
        try:
            problem = read_problem(row, format, default_id=place.replace(" ", "-"))
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{where}, {place}: {error} (format={format})") from error
        for mark in (f"id {problem.id}", " ".join(problem.prompt.split())):
            if mark in seen:
                raise ConfigError(f"{where}, {place}: the same problem or id as in {seen[mark]}; allowed is each once")
            seen[mark] = place
        kind = prefix + problem.kind
        problems.append(
            Problem(id=problem.id, prompt=problem.prompt, answer=problem.answer, kind=kind, stratum=problem.stratum)
        )
    if not problems:
        raise ConfigError(f"{where}: there are no problems in it")
    return problems


def checked_limit(limit: int | None) -> int | None:
    if limit is not None and limit < 1:
        raise ConfigError(f"limit={limit}: must be at least 1, or null for all problems")
    return limit


def _read_indices(path: Path, digest: str, count: int, limit: int | None) -> list[int]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        chosen = [int(index) for index in record["indices"]]
        written_for = record["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"indices={path}: not a file of drawn problems ({error})") from error
    if written_for != digest or any(not 0 <= index < count for index in chosen):
        raise ConfigError(f"indices={path} was written for other problems than are there now; delete it to draw anew")
    if limit is not None and limit != len(chosen):
        raise ConfigError(f"indices={path} names {len(chosen)} problems, but limit={limit}; delete it to draw anew")
    return chosen


def _digest(problems: Sequence[Problem]) -> str:
    text = json.dumps([[problem.prompt, str(problem.answer)] for problem in problems], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()
