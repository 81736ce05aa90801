"""Debates, loops with a stop rule, and routes."""

from __future__ import annotations

import asyncio

import pytest

from lightning_mappa.errors import ConfigError
from lightning_mappa.types import Task
from lightning_mappa.workflows.base import Message, last_agent_id
from lightning_mappa.workflows.graph import GraphWorkflow
from lightning_mappa.workflows.prompts import PromptTemplate
from tests.unit.workflows.table import Table, spec

TASK = Task(id="t", kind="math", prompt="1+2?", reference="3")


class Talker:
    """A `Seat` that says its lines one by one, and notes what it was shown."""

    def __init__(self, agent_id: str, lines: list[str], log: list[str]) -> None:
        self.agent_id = self.role = agent_id
        self._lines, self._log = list(lines), log

    async def act(self, task: Task, seen, **extra: object) -> Message:
        heard = ",".join(f"{m.agent_id}:{m.text}" for m in seen)
        self._log.append(f"{self.agent_id}{extra['round']}({heard})")
        return Message(agent_id=self.agent_id, role=self.role, text=self._lines.pop(0))


def play(steps, answer=None, **lines: list[str]) -> tuple[str, list[str]]:
    log: list[str] = []
    workflow = GraphWorkflow(steps, answer)
    seats = {name: Talker(name, lines.get(name, []), log) for name in workflow.agent_ids}
    return asyncio.run(workflow.run(TASK, seats)), log


# -- what is played, and who reads what -------------------------------------------------------------------------


def test_a_debate_of_two_and_a_judge():
    answer, log = play(
        [
            {"repeat": 2, "steps": [{"together": [{"act": "a"}, {"act": "b"}]}]},
            {"act": "judge", "reads": ["b", "a"]},
        ],
        a=["a1", "a2"],
        b=["b1", "b2"],
        judge=["done"],
    )
    assert answer == "done"
    # Side by side nobody hears the other's words of this round, and the judge reads the last of each in order.
    assert log == ["a1()", "b1()", "a2(b:b1)", "b2(a:a1)", "judge1(a:a2,b:b2)"]


LOOP = [
    {"act": "author"},
    {
        "repeat": 3,
        "until": {"agent": "critic", "says": r"(?m)^\W*ACCEPTED\b"},
        "steps": [{"act": "critic", "reads": ["author"]}, {"act": "author", "reads": ["critic"]}],
    },
]


@pytest.mark.parametrize(
    ("verdicts", "answer", "log"),
    [
        (["ACCEPTED"], "v1", ["author1()", "critic1(author:v1)"]),
        (
            ["not ACCEPTED yet", "line\n**ACCEPTED**"],
            "v2",
            ["author1()", "critic1(author:v1)", "author1(critic:not ACCEPTED yet)", "critic2(author:v2)"],
        ),
        (["no", "no", "no"], "v4", None),
    ],
)
def test_a_critic_loop_ends_when_the_critic_accepts_or_after_its_rounds(verdicts, answer, log):
    found, heard = play(LOOP, "author", author=["v1", "v2", "v3", "v4"], critic=list(verdicts))
    assert found == answer
    assert heard[: len(log or [])] == (log or [])
    assert len(heard) == (len(log) if log else 7)


def test_what_was_said_before_a_loop_does_not_end_it():
    steps = [{"act": "critic"}, *LOOP]
    _, heard = play(steps, "author", author=["v1", "v2"], critic=["ACCEPTED", "no", "ACCEPTED"])
    assert [line.partition("(")[0] for line in heard] == ["critic1", "author1", "critic1", "author1", "critic2"]


ROUTE = [
    {"act": "router"},
    {
        "route": "router",
        "cases": [
            {"says": r"\bCODE\b", "steps": [{"act": "coder"}]},
            {"says": "REASON|CODE", "steps": [{"act": "thinker", "reads": []}, {"act": "checker", "reads": "last"}]},
        ],
        "otherwise": [{"act": "thinker"}],
    },
]


@pytest.mark.parametrize(
    ("said", "answer", "log"),
    [
        ("use CODE or REASON", "c", ["coder1(router:use CODE or REASON)"]),
        ("REASON", "k", ["thinker1()", "checker1(thinker:t)"]),
        ("both", "t", ["thinker1(router:both)"]),
    ],
)
def test_a_route_takes_the_first_case_that_matches(said, answer, log):
    found, heard = play(ROUTE, router=[said], coder=["c"], thinker=["t"], checker=["k"])
    assert found == answer
    assert heard[1:] == log


def test_agents_are_named_in_order_and_the_end_is_known_where_it_is_certain():
    assert GraphWorkflow(ROUTE).agent_ids == ("router", "coder", "thinker", "checker")
    assert last_agent_id(GraphWorkflow(ROUTE)) is None
    assert last_agent_id(GraphWorkflow(LOOP)) is None
    assert last_agent_id(GraphWorkflow([{"act": "a"}, {"act": "b"}])) == "b"


def test_an_answer_of_an_agent_that_never_acted_is_a_failure_and_not_a_text():
    with pytest.raises(RuntimeError, match="coder, whose text is the answer, never acted"):
        play(ROUTE, "coder", router=["REASON"], coder=[], thinker=["t"], checker=["k"])


def test_an_agent_that_acts_again_goes_on_with_its_own_conversation():
    table = Table({"a": ["one", "two"], "b": ["<think>hm</think>but", "fine"]})
    template = PromptTemplate(
        "{% if seen %}{{ round }}: {{ seen[-1].text }}{% else %}{{ task.prompt }}{% endif %}", agent_id="x", key="user"
    )
    seats = {name: table.seat(spec(name, user=template)) for name in "ab"}
    steps = [{"repeat": 2, "steps": [{"act": "a", "reads": ["b"]}, {"act": "b", "reads": ["a"]}]}]
    assert asyncio.run(GraphWorkflow(steps, "a").run(TASK, seats)) == "two"
    assert [(x.agent_id, x.turn, x.prompt_text) for x in table.actions] == [
        ("a", 0, "1+2?"),
        ("b", 0, "1: one"),
        ("a", 1, "2: but"),
        ("b", 1, "2: two"),
    ]
    first, second = (x for x in table.actions if x.agent_id == "a")
    context = first.prompt_ids + first.response_ids
    assert second.prompt_ids[: len(context)] == context


# -- what is refused --------------------------------------------------------------------------------------------

A, B = {"act": "a"}, {"act": "b"}


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], r"workflow\.steps=\[\]: give a list of at least one step"),
        ("act", r"workflow\.steps='act': give a list"),
        (["a"], r"workflow\.steps\[0\]='a': a step is a mapping with one of act, together, repeat, route"),
        ([{}], r"workflow\.steps\[0\] has none of act"),
        ([{"act": "a", "repeat": 2}], r"workflow\.steps\[0\] has act and repeat of"),
        ([{"act": "a", "read": "all"}], r"workflow\.steps\[0\]\.read is no key of a step with act; .*: reads"),
        ([{"act": "a", "reads": "none"}], r"reads='none': allowed are all, last or a list of agents"),
        ([{"act": "a", "reads": ["c"]}], r"workflow\.steps\[0\]\.reads=c: that agent never acts; allowed are a"),
        ([{"act": 3}], r"workflow\.steps\[0\]\.act=3: give the name of an agent"),
        ([{"together": [A, A]}], r"together: allowed are steps with act, of each agent one"),
        ([{"together": [A, {"repeat": 1, "steps": [B]}]}], r"together: allowed are steps with act"),
        ([{"repeat": 0, "steps": [A]}], r"workflow\.steps\[0\]\.repeat=0: give a number of rounds"),
        ([{"repeat": True, "steps": [A]}], r"repeat=True"),
        ([{"repeat": 2}], r"workflow\.steps\[0\]\.steps=None: give a list"),
        ([{"repeat": 2, "steps": [A], "until": {"agent": "a"}}], r"until=.*: give agent and says"),
        ([{"repeat": 2, "steps": [A], "until": {"agent": "c", "says": "x"}}], r"until\.agent=c: that agent never acts"),
        ([{"repeat": 2, "steps": [A], "until": {"agent": "a", "says": "("}}], r"says='\(' is no regular expression"),
        ([{"route": "a", "cases": [], "otherwise": [A]}], r"cases=\[\]: give a list of says and steps"),
        ([A, {"route": "a", "cases": [{"says": "x"}], "otherwise": [A]}], r"workflow\.steps\[1\]\.cases\[0\]=.*: give"),
        ([A, {"route": "a", "cases": [{"says": "x", "steps": [B]}]}], r"workflow\.steps\[1\]\.otherwise=None"),
        ([{"route": "c", "cases": [{"says": "x", "steps": [A]}], "otherwise": [B]}], r"route=c: that agent never acts"),
    ],
)
def test_what_is_no_topology_is_refused_with_its_place(steps, message):
    with pytest.raises(ConfigError, match=message):
        GraphWorkflow(steps)


def test_an_answer_from_nobody_is_refused():
    with pytest.raises(ConfigError, match=r"workflow\.answer=c: allowed are a, b"):
        GraphWorkflow([A, B], "c")
