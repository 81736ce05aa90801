import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mappa.tools.code_blocks import code_blocks


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("no code here", []),
        ("```python\nprint(1)\n```", ["print(1)\n"]),
        ("So:\n```py\na = 1\n\nb = 2\n```\nDone.", ["a = 1\n\nb = 2\n"]),
        ("```PYTHON\nx\n```\ntext\n```Py\ny\n```", ["x\n", "y\n"]),
        ("```python title=a.py\nx\n```", ["x\n"]),
        ("```python \r\nif x:\r\n\ty()\r\n```\r\n", ["if x:\n\ty()\n"]),
        ("1. First\n   ```python\n   if x:\n       y()\n   ```", ["if x:\n    y()\n"]),
        ("\t```python\n\tx\n\t```", ["x\n"]),
        ("````python\ns = '''\n```\n'''\n````", ["s = '''\n```\n'''\n"]),
        ("```\nplain\n```", []),
        ("```bash\n```python\nls\n```\n```python\nx\n```", ["x\n"]),
        ("```python3\nx\n```", []),
        ("```pythonic\nx\n```", []),
        ("```python\n \n```", []),
        ("inline ```python x``` code", []),
        ("```python\nx\n```\n```python\nprint('cut", ["x\n"]),
        ("```python\nnever closed", []),
    ],
)
def test_what_counts_as_a_block(text, blocks):
    assert code_blocks(text) == blocks


@pytest.mark.parametrize(
    "text",
    [
        "<think>\n```python\nbad\n```\n</think>\n```python\ngood\n```",
        "```python\nbad\n```\n</think>\n```python\ngood\n```",
        "<think>a</think>\n```python\ngood\n```\n<think>b\n```python\nbad\n```",
        "<THINK>a</THINK>\n```python\ngood\n```",
    ],
)
def test_code_in_thinking_is_not_code(text):
    assert code_blocks(text) == ["good\n"]


@given(st.text(alphabet="ab \t\n", max_size=50).filter(str.strip))
def test_a_program_comes_back_as_it_was_written(program):
    assert code_blocks(f"text\n```python\n{program}\n```\n") == [program + "\n"]


def test_five_megabytes_of_fences_are_read_in_time():
    assert len(code_blocks("```python\nx = 1\n```\n" * 250_000)) == 250_000
