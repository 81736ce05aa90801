import pytest

from lightning_mappa.errors import InfrastructureError
from lightning_mappa.rollout.fingerprint import Fingerprint, ServedFingerprint, check_fingerprints, probe_ids

OWN = Fingerprint(prompt_ids=(1, 2), token_ids=(3, 4), log_probs=(-1.0, -2.0))


def served(
    version: int = 5, log_probs: tuple[float, ...] = (-1.0, -2.0), engine: str = "engine 0"
) -> ServedFingerprint:
    return ServedFingerprint(engine=engine, version=version, log_probs=log_probs)


def test_the_largest_difference_is_returned():
    replicas = [served(), served(log_probs=(-1.001, -2.0005))]
    assert check_fingerprints("solver", 5, OWN, replicas, 2e-3) == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("replica", "message"),
    [
        (served(version=4, engine="engine 1"), r"solver, engine 1 serves version 4 and not 5"),
        (served(log_probs=(-1.0, -2.1)), r"differs from the trainer by 0.1 nats .* allowed is 0.002"),
        (served(log_probs=(-1.0, float("nan"))), r"differs from the trainer by nan"),
    ],
)
def test_another_version_or_other_weights_stop_the_run(replica, message):
    with pytest.raises(InfrastructureError, match=message):
        check_fingerprints("solver", 5, OWN, [served(), replica], 2e-3)


def test_the_probe_fits_the_context_and_is_always_the_same():
    prompt_ids, token_ids = probe_ids(97, 64)
    assert (len(prompt_ids), len(token_ids)) == (63, 4)
    assert probe_ids(97, 64) == (prompt_ids, token_ids)
    assert all(0 <= token < 97 for token in prompt_ids + token_ids)
    assert len(probe_ids(97, 4096)[0]) == 144
