"""Rebuilds the packaged tiny table model: `python -m lightning_mappa.models.build_tiny_tables --out DIR`.

One Llama-architecture checkpoint with a tokenizer of words, trained from scratch on the demonstrations of
`table_demos`, all roles in one model. Seeded; three to five minutes on one core.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lightning_mappa.models.build_tiny import Schedule, encode, imitate, save
from lightning_mappa.models.table_demos import (
    ROLES,
    TableFaults,
    TablePrompts,
    demo_tasks,
    demonstrate,
)
from lightning_mappa.models.word_tokenizer import word_tokenizer, words_of
from lightning_mappa.types import Task

CONTEXT = 1024
N_TASKS = 240
"""Tables whose texts are demonstrated on; every column and every phrase of the generated ones is among them."""


def table_tokenizer(tasks: Sequence[Task]) -> PreTrainedTokenizerFast:
    """Knows every word that the demonstrations on `tasks` read and say."""
    rng, prompts = random.Random("words"), TablePrompts()
    chats = [chat for task in tasks for _ in range(8) for chat in demonstrate(task, TableFaults(), rng, prompts)]
    words = words_of(message["content"] for chat in chats for message in chat)
    return word_tokenizer(words, model_max_length=CONTEXT)


def table_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )


def table_batches(
    seed: int, tasks: Sequence[Task], per_step: int, rates: TableFaults, tokenizer: PreTrainedTokenizerFast
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Endless steps of one (ids, targets) batch per role."""
    rng, prompts = random.Random(f"tables/{seed}"), TablePrompts()
    while True:
        teams = [demonstrate(task, rates, rng, prompts) for task in rng.sample(tasks, per_step)]
        yield [encode(chats, tokenizer) for chats in zip(*teams, strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m lightning_mappa.models.build_tiny_tables", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    tasks = demo_tasks(N_TASKS)
    tokenizer = table_tokenizer(tasks)
    model = LlamaForCausalLM(table_config(tokenizer))
    schedule = Schedule(steps=options.steps, problems_per_step=12, lr=4e-3)
    imitate(
        model, table_batches(options.seed, tasks, schedule.problems_per_step, TableFaults(), tokenizer), ROLES, schedule
    )
    model.eval()
    save(model, tokenizer, options.out, made_by="lightning_mappa.models.build_tiny_tables")


if __name__ == "__main__":
    main()
