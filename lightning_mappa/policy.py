"""Log-probs of given tokens under a causal LM, without a tokens × vocabulary tensor."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from lightning_mappa.errors import ConfigError


class LogProbs(NamedTuple):
    log_probs_BT: Tensor
    """log p(token t | tokens before it) at the sampling temperature, 0 where not selected."""
    entropy_BT: Tensor | None
    """In nats, of the distribution that token t was drawn from, without gradient; 0 where not selected."""


class TokenLogProbs(nn.Module):
    """A causal LM, plain or with LoRA, as a function from token ids to their log-probs.

    Raises:
        ConfigError: the model's logits are more than a linear layer over its decoder's last hidden states.
    """

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        super().__init__()
        check_head(model)
        self.model = model
        self.head = VocabularyHead(_causal_lm(model).get_output_embeddings())

    def forward(
        self,
        input_ids_BT: Tensor,
        attention_mask_BT: Tensor,
        *,
        select_BT: Tensor,
        temperature: float,
        chunk_size: int,
        with_entropy: bool = False,
    ) -> LogProbs:
        """Args:
            input_ids_BT: int64, right-padded.
            attention_mask_BT: bool, false on pads.
            select_BT: bool, the tokens whose log-prob is wanted; false in column 0, which nothing precedes.
            temperature: the sampling temperature, above 0.
            chunk_size: vocabulary rows alive at a time.

        Returns float32 tensors, float64 ones for a float64 model. With nothing selected the zeros are still
        part of the graph, so that every rank runs the same collectives.
        """
        hidden_BTC = (
            _causal_lm(self.model)
            .get_decoder()(input_ids=input_ids_BT, attention_mask=attention_mask_BT, use_cache=False)
            .last_hidden_state
        )
        before_BS, wanted_BS = hidden_BTC[:, :-1], select_BT[:, 1:]
        log_probs_N, entropy_N = self.head(
            before_BS[wanted_BS],
            input_ids_BT[:, 1:][wanted_BS],
            temperature=temperature,
            chunk_size=chunk_size,
            with_entropy=with_entropy,
        )
        return LogProbs(
            log_probs_BT=_scatter(log_probs_N, select_BT),
            entropy_BT=_scatter(entropy_N, select_BT) if with_entropy else None,
        )


class VocabularyHead(nn.Module):
    """The vocabulary layer as a function from hidden states to the log-probs of given tokens.

    It runs over `chunk_size` tokens at a time and is run again in the backward pass, so that at no time more
    than `chunk_size` vocabulary rows are alive. All chunks run inside one call of this module, because ZeRO-3
    gathers weights per module call, which has to happen in all ranks alike however many chunks each has.

    Owns no parameters: the layer stays a part of its model only, under one name, tied or not.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._linear = (linear,)  # in a tuple, so that it does not become a submodule

    @property
    def borrowed(self) -> tuple[nn.Parameter, ...]:
        """The parameters that a call uses; under ZeRO-3 they are gathered for it."""
        return tuple(self._linear[0].parameters())

    def forward(
        self, hidden_NC: Tensor, targets_N: Tensor, *, temperature: float, chunk_size: int, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies, [N] each; the latter empty unless asked for."""
        (linear,) = self._linear
        chunks = [
            checkpoint(
                _head_log_probs,
                chunk_NC,
                linear.weight,
                linear.bias,
                chunk_targets_N,
                temperature,
                with_entropy,
                use_reentrant=False,
            )
            for chunk_NC, chunk_targets_N in zip(hidden_NC.split(chunk_size), targets_N.split(chunk_size), strict=True)
        ]
        log_probs_N, entropy_N = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        return log_probs_N, entropy_N


def check_head(model: PreTrainedModel | PeftModel) -> None:
    """Raises `ConfigError` unless logits = output embedding × the decoder's last hidden states, exactly.

    A probe of four tokens replaces the head's output by known values from −60 to 60. Soft-capping or scaling
    of logits changes them on their way out; scaling of hidden states shows at the head's input.
    """
    causal_lm = _causal_lm(model)
    head = causal_lm.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ConfigError(
            f"model.path: the output embedding of {type(causal_lm).__name__} is a {type(head).__name__} and not "
            "a plain linear layer; with LoRA, leave it out of model.lora.target_modules"
        )
    inputs: list[Tensor] = []
    planted: list[Tensor] = []

    def plant(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        inputs.append(args[0])
        planted.append(torch.linspace(-60, 60, output.numel()).to(output).view_as(output))
        return planted[-1]

    was_training = causal_lm.training
    causal_lm.eval()
    handle = head.register_forward_hook(plant)
    try:
        with torch.no_grad():
            ids_BT = torch.arange(4, device=head.weight.device)[None] % head.weight.shape[0]
            logits = causal_lm(input_ids=ids_BT, use_cache=False).logits
            hidden = causal_lm.get_decoder()(input_ids=ids_BT, use_cache=False).last_hidden_state
    finally:
        handle.remove()
        causal_lm.train(was_training)
    if not (
        torch.equal(logits.float(), planted[0].float()) and torch.allclose(inputs[0], hidden, rtol=1e-3, atol=1e-4)
    ):
        raise ConfigError(
            f"model.path: {type(causal_lm).__name__} caps or scales its logits; "
            "only models whose head is one linear layer can be trained"
        )


def _causal_lm(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    return cast(PreTrainedModel, model.get_base_model()) if isinstance(model, PeftModel) else model


def _head_log_probs(
    hidden_NC: Tensor,
    weight_VC: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    temperature: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    logits_NV = F.linear(hidden_NC, weight_VC, bias_V)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / temperature
    log_probs_NV = torch.log_softmax(logits_NV, dim=-1)
    log_probs_N = log_probs_NV.gather(-1, targets_N[:, None]).squeeze(-1)
    entropy_N = log_probs_N.new_zeros(0)
    if with_entropy:
        with torch.no_grad():
            entropy_N = torch.special.entr(log_probs_NV.exp()).sum(-1)
    return log_probs_N, entropy_N


def _scatter(values_N: Tensor, select_BT: Tensor) -> Tensor:
    zeros_BT = values_N.new_zeros(select_BT.shape)
    return zeros_BT.masked_scatter(select_BT, values_N)
