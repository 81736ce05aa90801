"""Rebuilds the packaged tiny model: `python -m lightning_mappa.models.build_tiny --out DIR`.

One Llama-architecture checkpoint with a character tokenizer, trained from scratch on the demonstrations of
`tiny_demos`, all roles in one model. Seeded; five to ten minutes on one core.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lightning_mappa.models.char_tokenizer import char_tokenizer
from lightning_mappa.models.tiny_demos import (
    ROLES,
    BriefPrompts,
    Chat,
    FaultRates,
    chat_ids,
    demonstrate,
    training_problem,
)
from lightning_mappa.models.tiny_probe import measure
from lightning_mappa.schedule import lr_factor
from lightning_mappa.tasks.arithmetic import Arithmetic

CONTEXT = 512
LICENCE = "Apache-2.0"
_SINGLE_SHARE = 0.25
"""Of the problems also shown to the single agent: enough for its format, mental arithmetic stays weak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    steps: int = 600
    problems_per_step: int = 24
    lr: float = 3e-3
    warmup_ratio: float = 0.1
    min_lr_ratio: float = 0.02

    def factor(self, step: int) -> float:
        return lr_factor(step, max_steps=self.steps, warmup_ratio=self.warmup_ratio, min_lr_ratio=self.min_lr_ratio)


def tiny_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )


def encode(chats: Sequence[Chat], tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Right-padded ids and targets, both int64 [B, T]; targets are −100 outside the assistant's turns.

    Target t is the token after token t; the end-of-turn token of each assistant turn is a target too.
    """
    rows = [_targets(ids, tokenizer) for ids in chat_ids(chats, tokenizer)]
    length = max(len(ids) for ids, _ in rows)
    pad = tokenizer.pad_token_id
    ids_BT = torch.tensor([ids + [pad] * (length - len(ids)) for ids, _ in rows])
    targets_BT = torch.tensor([targets + [-100] * (length - len(targets)) for _, targets in rows])
    return ids_BT, targets_BT


def _targets(ids: list[int], tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    speaking, end = tokenizer.convert_tokens_to_ids("<|assistant|>"), tokenizer.eos_token_id
    targets, inside = [], False
    for token, following in itertools.pairwise(ids):
        inside = (inside or token == speaking) and token != end
        targets.append(following if inside else -100)
    return ids[:-1], targets


def demo_batches(
    seed: int, problems: int, rates: FaultRates, tokenizer: PreTrainedTokenizerFast
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Endless steps of one (ids, targets) batch per role, so that the rows of a batch are of a length."""
    rng, prompts = random.Random(f"demos/{seed}"), BriefPrompts()
    while True:
        episodes = [demonstrate(training_problem(rng), rates, rng, prompts) for _ in range(problems)]
        solver, executor, verifier, single = zip(*episodes, strict=True)
        single = single[: max(1, round(_SINGLE_SHARE * problems))]
        yield [encode(chats, tokenizer) for chats in (solver, executor, verifier, single)]


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, schedule: Schedule) -> None:
    batches = demo_batches(seed, schedule.problems_per_step, FaultRates(), tokenizer)
    imitate(model, batches, ROLES, schedule)


def imitate(
    model: LlamaForCausalLM,
    batches: Iterator[Sequence[tuple[Tensor, Tensor]]],
    roles: Sequence[str],
    schedule: Schedule,
) -> None:
    """Cross-entropy on the assistants' tokens, averaged over the tokens of a step, which has a batch per role."""
    optimizers = _optimizers(model, schedule.lr)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.factor) for optimizer in optimizers]
    started = time.monotonic()
    model.train()
    for step in range(schedule.steps):
        losses = _backward(model, next(batches))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        model.zero_grad()
        if step % 50 == 0 or step == schedule.steps - 1:
            by_role = " ".join(f"{role} {loss:.3f}" for role, loss in zip(roles, losses, strict=True))
            print(f"step {step} {by_role} {time.monotonic() - started:.0f} s", flush=True)


def _backward(model: LlamaForCausalLM, batch: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    """Adds the gradient of the step's mean token loss; returns each role's own mean."""
    counts = [int((targets_BT >= 0).sum()) for _, targets_BT in batch]
    means = []
    for (ids_BT, targets_BT), count in zip(batch, counts, strict=True):
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
        loss = functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum")
        (loss / sum(counts)).backward()
        means.append(float(loss.detach()) / count)
    return means


def _optimizers(model: LlamaForCausalLM, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, which needs half the steps of AdamW here; AdamW for the rest."""
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(hidden, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def save(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    out: Path,
    made_by: str = "lightning_mappa.models.build_tiny",
) -> None:
    """Writes a Hugging Face folder; the weights file names the licence in its metadata."""
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    weights = out / "model.safetensors"
    metadata = {"format": "pt", "licence": LICENCE, "made_by": made_by}
    save_file(load_file(weights), weights, metadata=metadata)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m lightning_mappa.models.build_tiny", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=Schedule().steps)
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    tokenizer = char_tokenizer(model_max_length=CONTEXT)
    model = LlamaForCausalLM(tiny_config(tokenizer))
    train(model, tokenizer, options.seed, Schedule(steps=options.steps))
    model.eval()
    save(model, tokenizer, options.out)
    tasks = Arithmetic(seed=options.seed).tasks("selection")
    for temperature in (1.0, 0.6, 0.0):
        rates = measure(model, tokenizer, tasks, temperature, seed=options.seed)
        print(f"temperature {temperature}:", " ".join(f"{key} {rate:.3f}" for key, rate in rates.items()))


if __name__ == "__main__":
    main()
