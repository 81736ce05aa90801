r"""What a row of a well-known set of mathematics problems looks like.

| format | problem | answer | kind |
|---|---|---|---|
| `aime` | `prompt`, `problem` or `question` | `answer`: a whole number from 0 to 999, or alternatives | `aime` |
| `amc` | the same | `answer`: a whole number, also as 142.0; or a letter | `amc` |
| `math` | the same | `answer`, else the last `\boxed{}` of `solution`; `level`, `type` or `subject` | `math/3` |
| `gsm8k` | the same | `answer`: a number, or a text that ends in `#### 18` | `gsm8k` |

Keys are read in any case; `id`, `ID` and `unique_id` name a problem. Nothing but the problem reaches the agents.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_mappa.errors import ConfigError
from lightning_mappa.tasks.grading import boxed_answer
from lightning_mappa.tasks.verifiers import IntegerVerifier

PROBLEM_KEYS = ("prompt", "problem", "question")
ID_KEYS = ("id", "unique_id")
_FINAL = re.compile(r"####\s*(\S.*)")
_AIME = IntegerVerifier(0, 999)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One row, read; `answer` is as it stands there, for a verifier to accept or refuse."""

    id: str
    prompt: str
    answer: object
    kind: str
    """Task family, the key of per-kind figures."""
    stratum: str
    """What balanced batches and subsets deal out evenly: year, level and subject, or the kind."""


Row = Mapping[str, Any]
Reader = Callable[[Row], tuple[object, str, str]]
"""Answer, kind and stratum of a row whose keys are in lower case. Raises `ValueError`."""


def read_problem(row: object, reader: str, default_id: str) -> Problem:
    """Raises `ValueError` that says what the row lacks, and `ConfigError` for an unknown format."""
    if reader not in FORMATS:
        raise ConfigError(f"format={reader!r}: allowed are {', '.join(FORMATS)}")
    if not isinstance(row, Mapping):
        raise ValueError("a row is an object with a problem and its answer")
    lower = {str(key).lower(): value for key, value in row.items()}
    prompt = next((lower[key] for key in PROBLEM_KEYS if key in lower), None)
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f"it has no text under {', '.join(PROBLEM_KEYS)}")
    identity = next((lower[key] for key in ID_KEYS if lower.get(key) is not None), default_id)
    answer, kind, stratum = FORMATS[reader](lower)
    return Problem(id=str(identity), prompt=prompt, answer=answer, kind=kind, stratum=stratum)


def _aime(row: Row) -> tuple[object, str, str]:
    return _AIME.reference(_answer(row)), "aime", str(row.get("year", "aime"))


def _amc(row: Row) -> tuple[object, str, str]:
    return _answer(row), "amc", str(row.get("year", "amc"))


def _math(row: Row) -> tuple[object, str, str]:
    answer = row.get("answer")
    if answer is None and isinstance(row.get("solution"), str):
        answer = boxed_answer(row["solution"])
    if answer is None:
        raise ValueError(r"it has neither an answer nor a solution with a closed \boxed{}")
    level = re.sub(r"\D", "", str(row.get("level", "")))
    kind = f"math/{level}" if level else "math"
    subject = row.get("type", row.get("subject"))
    return answer, kind, f"{kind}/{subject}" if subject is not None else kind


def _gsm8k(row: Row) -> tuple[object, str, str]:
    answer = _answer(row)
    if isinstance(answer, str):
        found = _FINAL.findall(answer)
        answer = (found[-1] if found else answer).replace(",", "").replace("$", "").strip()
    return answer, "gsm8k", "gsm8k"


def _answer(row: Row) -> object:
    if "answer" not in row:
        raise ValueError("it has no answer")
    return row["answer"]


FORMATS: Mapping[str, Reader] = {"aime": _aime, "amc": _amc, "math": _math, "gsm8k": _gsm8k}
