"""Bytes of the parts of a trainer and of an engine.

Weights, gradients, optimizer states and adapters are exact. What a forward pass leaves behind, buffers and
workspaces are estimates, meant to be a little high.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_mappa.plan.model_facts import ModelFacts

GIB = 2**30
DTYPE_BYTES: Mapping[str, int] = {"bfloat16": 2, "float32": 4, "float64": 8}
ZERO_BUCKET = 500_000_000
"""Elements of the buffer in which DeepSpeed reduces gradients (`reduce_bucket_size`)."""
ZERO_LIVE = 1_000_000_000
"""Elements that ZeRO-3 keeps gathered at a time (`stage3_max_live_parameters`)."""
CUDA_CONTEXT = int(0.6 * GIB)
"""Of every process that uses a GPU: context, kernels, communicators."""
ENGINE_WORKSPACE = int(2 * GIB)
"""Of a vLLM engine on a GPU: activations of its largest batch, CUDA graphs."""
PROCESS_HOST = GIB
"""Host memory of a process that has imported its libraries."""

When = Literal["always", "update", "rollout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Memory of one process."""

    name: str
    device: int = 0
    """Bytes where the process computes: on its GPU, else in host memory."""
    host: int = 0
    """Bytes in host memory besides."""
    when: When = "always"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerShape:
    """What decides the memory of one rank of an agent."""

    facts: ModelFacts
    strategy: str
    ranks: int
    dtype: str
    """Of the weights as they are loaded."""
    bf16: bool
    """trainer.precision is bf16-mixed."""
    lora_parameters: int
    """0: all weights are trained."""
    reference: bool
    """A frozen copy of the trained tensors is kept for the KL penalty."""
    checkpointing: bool
    """Activations are computed again in the backward pass, layer by layer."""
    rows: int
    """Sequences per forward."""
    tokens: int
    """Tokens per forward, padding counted."""
    chunk: int
    """Tokens whose vocabulary row is alive at a time."""
    on_gpu: bool

    @property
    def zero(self) -> bool:
        return self.strategy.startswith("zero")

    @property
    def weight_bytes(self) -> int:
        """Of one weight. DeepSpeed casts the model to bf16; without it, mixed precision leaves weights as they are."""
        return 2 if self.zero and self.bf16 else DTYPE_BYTES[self.dtype]

    @property
    def trained_bytes(self) -> int:
        """Of one trained weight: PEFT keeps adapters of a bf16 model in float32, DeepSpeed casts them too."""
        if self.lora_parameters and not (self.zero and self.bf16):
            return max(4, self.weight_bytes)
        return self.weight_bytes

    @property
    def trained(self) -> int:
        return self.lora_parameters or self.facts.parameters

    @property
    def activation_bytes(self) -> int:
        return 2 if self.bf16 else DTYPE_BYTES[self.dtype]


def trainer_parts(shape: TrainerShape) -> tuple[Part, ...]:
    """Of one rank: what is there always, and what an update adds."""
    states = _zero_parts(shape) if shape.zero else _single_device_parts(shape)
    context = (Part(name="CUDA context", device=CUDA_CONTEXT),) if shape.on_gpu else ()
    parts = (
        *states,
        Part(name="activations", device=activations(shape), when="update"),
        Part(name="logits chunk", device=logits_chunk(shape), when="update"),
        *context,
        Part(name="process", host=PROCESS_HOST),
    )
    return tuple(part for part in parts if part.device or part.host)


def _single_device_parts(shape: TrainerShape) -> Sequence[Part]:
    """weights W·b (and an adapter A·b'), gradients T·b', AdamW 2·T·b', reference T·b'; T is what is trained.

    With mixed precision, autocast keeps a bf16 copy of each float32 weight that is trained while a forward and its
    backward last: 2·T.
    """
    trained = shape.trained * shape.trained_bytes
    copies = 2 * shape.trained if shape.bf16 and shape.trained_bytes == 4 else 0
    return (
        Part(name="weights", device=shape.facts.parameters * shape.weight_bytes),
        Part(name="adapter", device=shape.lora_parameters * shape.trained_bytes),
        Part(name="gradients", device=trained),
        Part(name="optimizer states", device=2 * trained),
        Part(name="reference", device=trained if shape.reference else 0),
        Part(name="autocast copies", device=copies, when="update"),
    )


def _zero_parts(shape: TrainerShape) -> Sequence[Part]:
    """Per rank of N, with b bytes a weight (2 under bf16) and T trained weights out of W + A:

    | | zero2 | zero3 | zero3_offload |
    |---|---|---|---|
    | weights, adapter | (W + A)·b | (W + A)·b / N | as zero3, in host memory |
    | gradients, summed up in float32 | 4·T / N | 4·T / N | in host memory |
    | float32 master weights | 4·T / N | 4·T / N | in host memory |
    | AdamW | 8·T / N | 8·T / N | in host memory |
    | reference | T·b | T·b / N | in host memory |
    | buckets | 2 · 5e8·b | 5e8·b | 5e8·b |
    | gathered during an update | – | min(W + A, 1e9)·b | the same |
    """
    n, b = shape.ranks, shape.weight_bytes
    stage3, offload = shape.strategy != "zero2", shape.strategy.endswith("offload")
    split = n if stage3 else 1
    base, adapter = shape.facts.parameters, shape.lora_parameters

    def held(name: str, total: int, over: int) -> Part:
        own = -(-total // over)
        return Part(name=name, host=own) if offload else Part(name=name, device=own)

    # Pages of a buffer that nobody writes to cost nothing in host memory.
    bucket = ZERO_BUCKET if shape.on_gpu else min(ZERO_BUCKET, shape.trained)
    n_buckets = 2 if not stage3 and shape.on_gpu else 1
    gathered = min(base + adapter, ZERO_LIVE) * b if stage3 else 0
    return (
        held("weights", base * b, split),
        held("adapter", adapter * b, split),
        held("gradients", 4 * shape.trained, n),
        held("master weights", 4 * shape.trained, n),
        held("optimizer states", 8 * shape.trained, n),
        held("reference", shape.trained * b if shape.reference else 0, split),
        Part(name="gradient buckets", device=n_buckets * bucket * b),
        Part(name="gathered weights", device=gathered, when="update"),
    )


def activations(shape: TrainerShape) -> int:
    """What a forward leaves for its backward.

    Of a decoder layer, per token, with a bytes an element: norms keep their input in float32 and their output,
    4·h + a·h each, twice; the residual stream, 2·a·h; gate, up, their activation and product, 4·a·i; queries, keys and
    values before and after rotation and norm, and attention's output, (4 + 3·a)·(q + 2·kv). With `checkpointing` all
    layers keep their input, a·h, and one at a time the rest. Padded batches also keep their mask, (1 + a)·S² a row.
    """
    facts, a = shape.facts, shape.activation_bytes
    q, kv = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
    layer = 8 * facts.hidden + 4 * a * facts.hidden + 4 * a * facts.intermediate + (4 + 3 * a) * (q + 2 * kv)
    per_token = layer + a * facts.hidden * facts.layers if shape.checkpointing else layer * facts.layers
    length = shape.tokens // shape.rows
    mask = (1 + a) * length * length * shape.rows if shape.rows > 1 else 0
    return shape.tokens * per_token + mask


def logits_chunk(shape: TrainerShape) -> int:
    """Of C tokens and V words: logits and their gradient, 2·a; in float32 the scaled logits, log-probs and both
    gradients, 16 (32 in float64): C · V · (2·a + 16)."""
    wide = 32 if shape.activation_bytes == 8 else 16
    return min(shape.chunk, shape.tokens) * shape.facts.vocab * (2 * shape.activation_bytes + wide)


def kv_bytes_per_token(facts: ModelFacts, dtype: str, tensor_parallel_size: int = 1) -> int:
    """Keys and values of every layer, on one GPU of an engine: 2 · L · heads · d · b.

    Key heads are dealt to the workers; where there are fewer heads than workers, each has one.
    """
    heads = max(1, facts.kv_heads // tensor_parallel_size)
    return 2 * facts.layers * heads * facts.head_dim * DTYPE_BYTES[dtype]


def engine_weights(facts: ModelFacts, dtype: str, tensor_parallel_size: int = 1) -> int:
    return -(-facts.parameters * DTYPE_BYTES[dtype] // tensor_parallel_size)
