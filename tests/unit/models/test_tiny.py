import asyncio
import random
from collections import Counter
from importlib.resources import files

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from lightning_mappa.models.build_tiny import Schedule, demo_batches, encode, save, tiny_config, train
from lightning_mappa.models.char_tokenizer import char_tokenizer
from lightning_mappa.models.tiny_demos import (
    NO_FAULTS,
    ROLES,
    BriefPrompts,
    FaultRates,
    chat_ids,
    demonstrate,
    run_code,
    training_problem,
    wrong_digit,
    wrong_operator,
)
from lightning_mappa.models.tiny_probe import measure
from lightning_mappa.tasks.arithmetic import Arithmetic, Problem
from lightning_mappa.tasks.expressions import evaluate
from lightning_mappa.tools.python import PythonTool
from lightning_mappa.workflows.conversation import ChatFormat, Conversation

TINY = files("lightning_mappa.models") / "tiny"
PROBLEM = Problem(text="Ana has 12 red and 7 blue cups, 3 of each.", expression="(12+7)*3", band=2)


@pytest.fixture(scope="module")
def tiny():
    return AutoModelForCausalLM.from_pretrained(str(TINY)).eval(), AutoTokenizer.from_pretrained(str(TINY))


def test_packaged_model_is_small_and_licensed(tiny):
    model, _ = tiny
    assert isinstance(model, LlamaForCausalLM)
    assert sum(parameter.numel() for parameter in model.parameters()) <= 1_000_000
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    weights = TINY / "model.safetensors"
    assert len(weights.read_bytes()) <= 4 * 2**20
    with safe_open(str(weights), framework="pt") as file:
        assert file.metadata()["licence"] == "Apache-2.0"


def test_packaged_tokenizer_is_the_character_tokenizer(tiny):
    model, tokenizer = tiny
    built = char_tokenizer()
    assert tokenizer.get_vocab() == built.get_vocab()
    assert tokenizer.chat_template == built.chat_template
    assert model.config.vocab_size == len(built)
    assert model.config.eos_token_id == tokenizer.eos_token_id == built.eos_token_id
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 512


def test_packaged_model_holds_right_and_faulty_ways(tiny):
    """The bars of the warm start: greedy it can nearly everything, sampled it solves a part."""
    model, tokenizer = tiny
    tasks = Arithmetic(seed=7, n_train=1, n_selection=64, n_report=1).tasks("selection")
    greedy = measure(model, tokenizer, tasks, temperature=0, seed=0)
    assert greedy["system"] >= 0.8
    assert min(greedy[stage] for stage in ("solver", "code", "report", "verifier")) >= 0.85
    sampled = measure(model, tokenizer, tasks, temperature=0.6, seed=0)
    assert 0.2 <= sampled["system"] <= 0.6


def test_a_demonstration_without_faults_is_exact():
    solver, executor, verifier, single = demonstrate(PROBLEM, NO_FAULTS, random.Random(0), BriefPrompts())
    assert solver == [_user(f"Solve: {PROBLEM.text}"), _assistant("(12+7)*3")]
    assert executor == [
        _user("Code: (12+7)*3"),
        _assistant("```python\nprint((12+7)*3)\n```"),
        {"role": "tool", "content": "57"},
        _assistant("57"),
    ]
    assert verifier == [_user("Check: 57"), _assistant(r"\boxed{57}")]
    assert single == [_user(f"Answer: {PROBLEM.text}"), _assistant(r"\boxed{57}")]


@pytest.mark.parametrize(
    ("text", "operator", "digit"),
    [
        ("(12+7)*3", "(12+7)+3", "(12+7)*4"),
        ("(12+9)//3-1", "(12+9)//3+1", "(12+9)//3-2"),
        ("40//9", "40*9", "40//1"),
        ("2*10+5", "2*10-5", "2*10+6"),
    ],
)
def test_faults_by_hand(text, operator, digit):
    assert wrong_operator(text) == operator
    assert wrong_digit(text) == digit


def test_wrong_digit_leaves_words():
    assert wrong_digit("error") == "error"


def test_faults_occur_at_their_rates_and_are_passed_on():
    rates, rng, prompts = FaultRates(), random.Random(0), BriefPrompts()
    n, seen = 2000, Counter()
    for _ in range(n):
        problem = training_problem(rng)
        assert problem.split == "train"
        solver, executor, verifier, _ = demonstrate(problem, rates, rng, prompts)
        expression, code, report, answer = (
            solver[-1]["content"],
            executor[1]["content"],
            executor[-1]["content"],
            verifier[-1]["content"],
        )
        output = executor[2]["content"]
        assert executor[0]["content"] == f"Code: {expression}"
        assert verifier[0]["content"] == f"Check: {report}"
        seen["solver_operator"] += expression == wrong_operator(problem.expression)
        seen["solver_number"] += expression == wrong_digit(problem.expression)
        seen["code_bare"] += "print" not in code
        seen["code_syntax"] += f"print({expression}\n" in code
        seen["code_operator"] += f"print({wrong_operator(expression)})" in code
        seen["report_digit"] += report != output
        seen["verifier_unboxed"] += "box" not in answer
        seen["verifier_digit"] += answer == rf"\boxed{{{wrong_digit(report)}}}" and report != wrong_digit(report)
    for fault, count in seen.items():
        # A report or answer without a digit has no wrong one, hence the room below.
        rate = getattr(rates, fault)
        assert 0.7 * rate - 0.02 <= count / n <= rate + 0.03, fault


@pytest.mark.parametrize(
    "code",
    [
        "```python\nprint((12+7)*3)\n```",
        "```python\n(12+7)*3\n```",
        "```python\nprint((12+7)*3\n```",
        "```python\nprint(12//0)\n```",
        "```python\nprint(3-40)\n```",
    ],
)
def test_demonstrated_outputs_are_those_of_python(code, tmp_path):
    tool, prompts = PythonTool(), BriefPrompts()
    (call,) = tool.parse(code)
    ran = asyncio.run(tool.run(call, tmp_path))
    assert prompts.observation(run_code(code)) == prompts.observation(ran)


def test_only_what_the_assistant_says_is_a_target():
    tokenizer = char_tokenizer()
    chat = demonstrate(PROBLEM, NO_FAULTS, random.Random(0), BriefPrompts())[1]
    ids_BT, targets_BT = encode([chat, chat[:2]], tokenizer)
    assert ids_BT.shape == targets_BT.shape
    said = ["".join(tokenizer.convert_ids_to_tokens(row[row >= 0].tolist())) for row in targets_BT]
    assert said == ["```python\nprint((12+7)*3)\n```<|end|>57<|end|>", "```python\nprint((12+7)*3)\n```<|end|>"]
    spoken = targets_BT[0, :-1] >= 0
    assert torch.equal(targets_BT[0, :-1][spoken], ids_BT[0, 1:][spoken])


def test_demonstrations_read_as_conversations_do():
    """The ids of a two-turn demonstration are those that the workflow's conversation grows to."""
    tokenizer = char_tokenizer()
    question, code, observed, report = demonstrate(PROBLEM, NO_FAULTS, random.Random(0), BriefPrompts())[1]
    form = ChatFormat(tokenizer)
    conversation = Conversation(form, system="", user=question["content"])
    sampled = [*tokenizer.encode(code["content"]), tokenizer.eos_token_id]
    conversation.extend(sampled, role=form.tool_role, content=observed["content"])
    demonstrated = chat_ids([[question, code, observed, report]], tokenizer)[0]
    assert demonstrated[: len(conversation.prompt_ids)] == list(conversation.prompt_ids)
    assert tokenizer.decode(demonstrated[len(conversation.prompt_ids) :]) == "57<|end|>"


def test_responses_fit_their_limits():
    rng, prompts, tokenizer = random.Random(1), BriefPrompts(), char_tokenizer()
    for _ in range(500):
        chats = demonstrate(training_problem(rng), FaultRates(), rng, prompts)
        for role, chat in zip(ROLES, chats, strict=True):
            for message in chat:
                if message["role"] == "assistant":
                    assert len(tokenizer.encode(message["content"])) + 1 <= prompts.max_new_tokens[role]


def test_build_learns_is_seeded_and_saves_what_it_trained(tmp_path, capsys):
    def build():
        torch.manual_seed(0)
        model = LlamaForCausalLM(tiny_config(tokenizer))
        train(model, tokenizer, seed=0, schedule=Schedule(steps=4, problems_per_step=2, warmup_ratio=0.25))
        return model

    tokenizer = char_tokenizer(model_max_length=512)
    first, second = build(), build()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    losses = [float(line.split("solver ")[1].split()[0]) for line in capsys.readouterr().out.splitlines()]
    assert losses[1] < losses[0] - 0.2

    save(first, tokenizer, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids_BT = next(demo_batches(1, 1, NO_FAULTS, tokenizer))[0][0]
    with torch.no_grad():
        assert torch.equal(loaded(ids_BT).logits, first.eval()(ids_BT).logits)


def test_bands_of_demonstrations_have_values():
    rng = random.Random(2)
    assert all(evaluate(training_problem(rng).expression) > 0 for _ in range(200))


def _user(text):
    return {"role": "user", "content": text}


def _assistant(text):
    return {"role": "assistant", "content": text}
