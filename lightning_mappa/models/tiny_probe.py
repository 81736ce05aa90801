"""How often each role of the tiny model does right, without workflow, engine and sandbox."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lightning_mappa.models.tiny_demos import BriefPrompts, Chat, chat_ids, run_code
from lightning_mappa.tasks.expressions import evaluate
from lightning_mappa.types import Task
from lightning_mappa.workflows.base import Message


def measure(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    tasks: Sequence[Task],
    temperature: float,
    seed: int,
) -> dict[str, float]:
    """Plays MathChat on every task, all tasks in one batch; shares of 0…1.

    `solver`: the expression has the right value. `code`: it prints the value of the expression handed
    over, and there is one.
    `report` and `verifier`: what was handed over comes back. `system`: the right number is boxed. `single`:
    the right number is boxed without help.
    """
    prompts = BriefPrompts()
    torch.manual_seed(seed)

    def say(role: str, chats: Sequence[Chat]) -> list[str]:
        return reply(model, tokenizer, chats, prompts.max_new_tokens[role], temperature)

    def handed(texts: Sequence[str]) -> list[list[Message]]:
        return [[Message(agent_id="", role="", text=text)] for text in texts]

    expressions = say("solver", [prompts.opening("solver", task.prompt) for task in tasks])
    chats = [prompts.opening("executor", "", seen) for seen in handed(expressions)]
    codes = say("executor", chats)
    observations = [prompts.observation(run_code(code)) for code in codes]
    turns = zip(chats, codes, observations, strict=True)
    chats = [[*chat, {"role": "assistant", "content": code}, observed] for chat, code, observed in turns]
    reports = say("executor", chats)
    answers = say("verifier", [prompts.opening("verifier", "", seen) for seen in handed(reports)])
    singles = say("single", [prompts.opening("single", task.prompt) for task in tasks])

    outputs = [observed["content"] for observed in observations]
    references = [task.reference for task in tasks]
    values = [_value(expression) for expression in expressions]
    return {
        "solver": _share(values, references),
        "code": _share(outputs, values),
        "report": _share(reports, outputs),
        "verifier": _share([_boxed(answer) for answer in answers], reports),
        "system": _share([_boxed(answer) for answer in answers], references),
        "single": _share([_boxed(answer) for answer in singles], references),
    }


@torch.inference_mode()
def reply(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    chats: Sequence[Chat],
    max_new_tokens: int,
    temperature: float,
) -> list[str]:
    """One assistant turn for each chat; temperature 0 is greedy."""
    prompts = chat_ids(chats, tokenizer, generation_prompt=True)
    length = max(map(len, prompts))
    padding = [length - len(ids) for ids in prompts]
    pad = tokenizer.pad_token_id
    ids_BT = torch.tensor([[pad] * n + ids for n, ids in zip(padding, prompts, strict=True)])
    mask_BT = torch.arange(length)[None] >= torch.tensor(padding)[:, None]
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        temperature=temperature or None,
        top_k=0 if temperature else None,
        pad_token_id=pad,
        eos_token_id=tokenizer.eos_token_id,
    )
    generate: Callable[..., Tensor] = cast(Any, model).generate  # its annotation refuses every model class
    out_BT = generate(inputs=ids_BT, attention_mask=mask_BT.long(), generation_config=config)
    return tokenizer.batch_decode(out_BT[:, length:], skip_special_tokens=True)


def _value(expression: str) -> str | None:
    try:
        return str(evaluate(expression))
    except ValueError:
        return None


def _boxed(text: str) -> str | None:
    found = re.fullmatch(r"\\boxed\{(.*)\}", text)
    return found.group(1) if found else None


def _share(got: Sequence[str | None], wanted: Sequence[str | None]) -> float:
    return sum(a == b for a, b in zip(got, wanted, strict=True)) / len(got)
