"""Pickles are programs: what one of them does, it does in the sandbox of whoever loads it."""

from __future__ import annotations

import pytest

from lightning_mappa.types import ToolStatus


@pytest.mark.parametrize("name", ["model.pkl", "data.csv", "data.joblib", "data.parquet", "model.pt"])
def test_37_39_a_pickle_runs_in_the_next_agents_sandbox_only(run, harness, name):
    """That the run's own process loads none is held by the lint rules and by the collector's tests."""
    target = str(harness.outside / "sprung")
    assert run(
        f"""
        import pickle
        class Trap:
            def __reduce__(self):
                return exec, ("print('sprung'); import os; open('inside', 'w').close(); open({target!r}, 'w')",)
        pickle.dump(Trap(), open({name!r}, "wb"))
        """
    ).ok
    result = run(f"import pickle; pickle.load(open({name!r}, 'rb'))")
    assert (result.status, result.stdout) == (ToolStatus.NONZERO, "sprung\n"), result
    assert run("import os; print(os.path.exists('inside'))").stdout == "True\n"
    assert not (harness.outside / "sprung").exists()


def test_39_numpy_says_no_by_itself(run):
    result = run(
        """
        import numpy as np
        np.save("data.npy", np.array([{}], dtype=object), allow_pickle=True)
        np.load("data.npy")
        """
    )
    assert result.status is ToolStatus.NONZERO
    assert "allow_pickle=False" in result.stderr


SEVENTEEN_BYTES = r"b'\x80\x04cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x02\x85R.'"
DOUBLED = r"""
b"".join((b"(lp0\n0", *(b"(lp%d\ng%d\nag%d\na0" % (n + 1, n, n) for n in range(40)), b"g40\n."))
"""


def test_38_a_few_bytes_that_ask_for_8_gib(run):
    result = run(f"import pickle; pickle.loads({SEVENTEEN_BYTES})")
    assert result.status is ToolStatus.MEMORY, result


def test_38_a_structure_of_two_to_the_fortieth_nodes(run):
    result = run(f"import pickle\nfound = pickle.loads({DOUBLED.strip()})\nfound = repr(found)", wall_s=0.5)
    assert result.status in (ToolStatus.MEMORY, ToolStatus.TIMEOUT), result
