"""Each part is closed whatever becomes of the others, and no error of closing hides what ended a run."""

from __future__ import annotations

from contextlib import closing

import pytest

from lightning_mappa.coaches.base import close_coach
from lightning_mappa.coaches.ensemble import EnsembleCoach
from lightning_mappa.errors import RankLost
from lightning_mappa.system import Environment
from lightning_mappa.testing import ScriptedCoach


class Part(ScriptedCoach):
    """Any part of an environment: it can be closed, or it cannot."""

    def __init__(self, name: str, error: Exception | None = None) -> None:
        super().__init__(lambda episode, index: 5.0, name=name)
        self.error = error
        self.closed = 0

    def close(self) -> None:
        self.closed += 1
        if self.error is not None:
            raise self.error


def parts() -> list[Part]:
    errors = {"b": TimeoutError(), "c": OSError("busy")}
    return [Part(name, errors.get(name)) for name in "abcd"]


def environment(made):
    return Environment(workflow=None, source=made[0], tools={"t": made[1]}, coach=EnsembleCoach(made[2:]))


def test_all_are_closed_and_the_first_error_is_raised(caplog):
    made = parts()
    with pytest.raises(TimeoutError):
        environment(made).close()
    assert [part.closed for part in made] == [1] * 4
    assert caplog.messages == ["Part cannot be closed: OSError: busy"]


def test_what_is_being_raised_goes_on(caplog):
    made = parts()
    with pytest.raises(RankLost, match="gone"), closing(environment(made)):
        raise RankLost("gone")
    assert [part.closed for part in made] == [1] * 4
    assert caplog.messages == ["Part cannot be closed: TimeoutError: ", "Part cannot be closed: OSError: busy"]


def test_the_parts_of_a_coach_are_closed_alike():
    made = parts()
    with pytest.raises(TimeoutError):
        close_coach(EnsembleCoach(made))
    assert [part.closed for part in made] == [1] * 4
