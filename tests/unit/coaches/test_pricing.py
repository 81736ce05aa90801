"""Dollars: hand-worked, per tier, and a bound that no reply passes."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mappa.coaches.pricing import Prices
from lightning_mappa.coaches.provider import Usage
from lightning_mappa.errors import ConfigError
from tests.unit.coaches.calls import PRICES, make_request

HAIKU = [
    {"up_to": 100_000, "input": 0.10, "cache_read": 0.01, "cache_write": 0.125, "output": 0.50},
    {"input": 0.50, "cache_read": 0.05, "cache_write": 0.625, "output": 2.50},
]


def test_each_kind_of_token_has_its_price():
    usage = Usage(
        input_tokens=1_000_000,
        cache_read_tokens=1_000_000,
        cache_write_tokens=1_000_000,
        output_tokens=1_000_000,
        thinking_tokens=900_000,
    )
    assert Prices.of(PRICES).cost(usage) == Decimal("7.35")


@pytest.mark.parametrize(
    ("cached", "dollars"),
    [(95_000, Decimal("0.00195")), (95_001, Decimal("0.00975005"))],  # 5000 in, 1000 out
)
def test_the_tier_is_that_of_the_whole_prompt_cached_or_not(cached, dollars):
    usage = Usage(input_tokens=5_000, cache_read_tokens=cached, output_tokens=1_000)
    assert Prices.of(HAIKU).cost(usage) == dollars


def test_a_usual_call_costs_a_tenth_of_a_cent():
    assert Prices.of(HAIKU).cost(Usage(input_tokens=5_000, output_tokens=1_000)) == Decimal("0.001")


@given(text=st.text(max_size=200), written=st.booleans(), share=st.floats(0, 1))
def test_no_reply_passes_the_bound_where_every_byte_is_a_token(text, written, share):
    """The worst tokenizer there is, with prompt and output at their limits, in either tier."""
    for padding in ("", "x" * 150_000):
        request = make_request(question=text + padding, system="", shared="")
        tokens = int(share * len(request.question.encode())) if padding else len(request.question.encode())
        kind = "cache_write_tokens" if written else "input_tokens"
        usage = Usage(**{kind: tokens}, output_tokens=request.max_tokens)
        assert Prices.of(HAIKU).cost(usage) <= Prices.of(HAIKU).bound(request)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"input": 1, "output": 5}, "needed input, cache_read, cache_write, output"),
        ({**PRICES, "outptu": 1}, "given input, cache_read, cache_write, output, outptu"),
        ({**PRICES, "input": -1}, r"prices.input=-1: must be dollars"),
        ({**PRICES, "input": float("nan")}, r"prices.input=nan"),
        ({**PRICES, "output": True}, r"prices.output=True"),
        ({**PRICES, "up_to": 10}, r"up_to is \[10\]"),
        ([{**PRICES, "up_to": 10}, {**PRICES, "up_to": 10}, PRICES], "must rise"),
        ([PRICES, PRICES], "must rise"),
        ([{**PRICES, "up_to": 0}, PRICES], "up_to=0"),
        ([], "up_to is"),
        (["cheap"], "'cheap' is no mapping"),
    ],
)
def test_a_wrong_price_list_is_refused_in_one_sentence(config, message):
    with pytest.raises(ConfigError, match=message):
        Prices.of(config)
