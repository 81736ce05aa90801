import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mappa.errors import ConfigError
from lightning_mappa.tools.outcome import Outcome, classify, clean, head_and_tail
from lightning_mappa.tools.python import PythonTool
from lightning_mappa.tools.sandbox import Limits
from lightning_mappa.types import ToolStatus


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"a\tb\n", "a\tb\n"),
        (b"\xff\xfeok", "\ufffd\ufffdok"),
        (b"\xed\xa0\x80", "\ufffd\ufffd\ufffd"),
        (b"nul\x00 bell\x07 del\x7f", "nul bell del"),
        (b"\x1b[31mred\x1b[0m \x1b]0;title\x07end", "red end"),
        (b"line\r\nnext", "line\nnext"),
        ("\u009b31m é".encode(), "31m é"),
    ],
)
def test_output_is_made_safe(raw, text):
    assert clean(raw) == text


@given(st.binary(max_size=200))
def test_no_control_character_survives(raw):
    assert all(char in "\n\t" or not (ord(char) < 32 or 127 <= ord(char) < 160) for char in clean(raw))


def test_the_middle_is_left_out_and_counted():
    assert head_and_tail("0123456789", 10) == "0123456789"
    assert head_and_tail("0123456789", 5) == "012\n[… 5 characters left out …]\n89"
    assert head_and_tail("0123456789", 1) == "0\n[… 9 characters left out …]\n"


@given(st.text(), st.integers(1, 20))
def test_both_ends_together_have_the_limit(text, limit):
    head, line, tail = head_and_tail(text, limit).partition(f"\n[… {len(text) - limit} characters left out …]\n")
    assert bool(line) == (len(text) > limit)
    assert len(head + tail) == min(len(text), limit)
    assert text.startswith(head)
    assert text.endswith(tail)


@pytest.mark.parametrize(
    ("code", "stderr", "status"),
    [
        (0, b"MemoryError\n", ToolStatus.OK),
        (1, b"Traceback\n  MemoryError = 1\nValueError: MemoryError\n", ToolStatus.NONZERO),
        (1, b"Traceback\nMemoryError\n", ToolStatus.MEMORY),
        (1, b"numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8 GiB\n", ToolStatus.MEMORY),
        (-6, b"terminate called after throwing an instance of 'std::bad_alloc'\n", ToolStatus.MEMORY),
        (1, b"OSError: [Errno 28] No space left on device\n", ToolStatus.DISK_LIMIT),
        (-25, b"", ToolStatus.DISK_LIMIT),
        (-24, b"", ToolStatus.TIMEOUT),
        (-11, b"", ToolStatus.SIGNAL),
        (1, b"RuntimeError: can't start new thread\n", ToolStatus.PROCESS_LIMIT),
    ],
)
def test_how_an_end_is_read(code, stderr, status):
    assert classify(Outcome(started=True, exit_code=code, stderr=stderr), Limits())[0] is status


def test_what_never_started_is_not_the_programs_fault():
    outcome = Outcome(started=False, exit_code=1, stderr=b"bwrap: no permissions\n")
    assert classify(outcome, Limits()) == (
        ToolStatus.SANDBOX_ERROR,
        "the sandbox failed: bwrap: no permissions",
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [("wall_s", 0), ("processes", -1), ("isolation", "docker"), ("max_concurrency", 0), ("output_chars", 1)],
)
def test_a_value_out_of_range_is_refused_with_its_key(key, value):
    with pytest.raises(ConfigError, match=f"tools.python.{key}={value}: must be"):
        PythonTool(**{key: value})
