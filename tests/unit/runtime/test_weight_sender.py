"""The order of a push past the run, and who refuses it."""

import pytest
import torch

from lightning_mappa.errors import InfrastructureError
from lightning_mappa.rollout.fingerprint import Fingerprint
from lightning_mappa.runtime.remote_link import Answer, RemoteLink
from lightning_mappa.runtime.weight_sender import send_straight
from lightning_mappa.strategies.zero import WholeTensors

PRINT = Fingerprint(prompt_ids=(1,), token_ids=(2,), log_probs=(-1.0,))
TENSORS = WholeTensors({"a": torch.nn.Parameter(torch.ones(2, 3)), "b": torch.nn.Parameter(torch.zeros(4))})


class Sender:
    def __init__(self):
        self.heard = []

    def send(self, tensors, engines):
        self.heard.append((dict(tensors.shapes), [name for name, _ in tensors], list(engines)))
        return 40


def link(sender, *answers):
    """A Trainer's line whose other end has its answers ready."""
    line = RemoteLink("solver", first_step=0, max_steps=1, timeout_s=5.0, sender=sender)
    for number, value in enumerate(answers):
        error = value if isinstance(value, Exception) else None
        line.answer(Answer(number=number, value=None if error else value, error=error))
    return line


def test_room_is_made_then_the_tensors_go_then_the_run_is_told():
    sender = Sender()
    line = link(sender, ["engine"], None)
    line.push_weights(3, TENSORS, PRINT)
    assert sender.heard == [({"a": (2, 3), "b": (4,)}, ["a", "b"], ["engine"])]
    offer, sent = line.next_event(0.1), line.next_event(0.1)
    assert (offer.method, offer.arguments) == ("offer_weights", (3,))
    assert (sent.method, sent.arguments) == ("weights_sent", (3, 40, PRINT))
    assert line.next_event(0.01) is None


def test_nothing_is_sent_where_no_room_was_made():
    sender = Sender()
    with pytest.raises(InfrastructureError, match="asleep"):
        link(sender, InfrastructureError("asleep")).push_weights(1, TENSORS, PRINT)
    assert sender.heard == []


def test_a_stream_without_shapes_is_refused():
    with pytest.raises(TypeError, match="need their shapes"):
        send_straight(link(Sender(), [], None), Sender(), 1, iter([]), PRINT)


def test_whole_tensors_may_be_read_again():
    assert [name for name, _ in TENSORS] == [name for name, _ in TENSORS] == ["a", "b"]
