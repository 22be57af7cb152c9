"""What a request alone takes, and which promises that breaks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.config import SloConfig
from echo_sgl.estimators.floor import SloFloor, check_slo, slo_floor
from echo_sgl.estimators.host_time import HostTime
from tests.estimators.steps import any_models, shape_of, true_model

FLOOR = SloFloor(prompt_tokens=100, ttft_s=0.2, tpot_s=0.01)


def test_the_floor_is_one_prefill_and_one_decode_alone():
    model = true_model("pooled")
    floor = slo_floor(model, prompt_tokens=500)
    assert floor.ttft_s == model.predict_s(shape_of([(500, 0)]))
    assert floor.tpot_s == model.predict_s(shape_of([(0, 501)]))


def test_what_the_host_takes_around_and_between_the_steps_is_part_of_the_floor():
    model, host = true_model("pooled"), HostTime(step_s=0.003, request_s=0.001, intake_s=0.05)
    device = slo_floor(model, prompt_tokens=500)
    floor = slo_floor(model, prompt_tokens=500, host=host)
    assert floor.ttft_s == pytest.approx(device.ttft_s + 0.05)
    assert floor.tpot_s == pytest.approx(device.tpot_s + 0.003 + 0.001)


def test_a_long_prompt_is_prefilled_in_chunks_behind_what_is_done():
    model = true_model("linear")
    chunks = [(200, 100), (200, 300), (1, 500)]
    floor = slo_floor(model, prompt_tokens=501, cached_tokens=100, chunk_tokens=200)
    assert floor.ttft_s == pytest.approx(sum(model.predict_s(shape_of([one])) for one in chunks))


@given(any_models(), st.integers(1, 5000), st.integers(1, 5000), st.integers(0, 600))
def test_a_longer_prompt_has_no_lower_floor(model, prompt_tokens, more, chunk_tokens):
    short, long = (
        slo_floor(model, prompt_tokens=tokens, chunk_tokens=chunk_tokens)
        for tokens in (prompt_tokens, prompt_tokens + more)
    )
    assert short.ttft_s <= long.ttft_s and short.tpot_s <= long.tpot_s


@pytest.mark.parametrize("cached", [-1, 10, 11])
def test_a_prompt_without_anything_to_compute_is_refused(cached):
    with pytest.raises(ValueError, match="at least one must be left"):
        slo_floor(true_model("bros"), prompt_tokens=10, cached_tokens=cached)


@pytest.mark.parametrize(
    "slo", [{}, {"ttft_s": 0.2, "tpot_s": 0.01}, {"ttft_s": 5.0, "min_ttft_s": 0.3}]
)
def test_promises_at_or_above_the_floor_or_none_at_all_can_be_kept(slo):
    assert check_slo(SloConfig(**slo), FLOOR) is None


def test_every_promise_below_the_floor_is_named_with_the_figure():
    message = check_slo(SloConfig(ttft_s=0.1, tpot_s=0.005, min_tpot_s=0.02), FLOOR)
    assert message is not None
    assert "slo.ttft_s promises 0.1 s, but one request of 100 tokens alone takes 0.2 s" in message
    assert "slo.tpot_s promises 0.005 s" in message and "takes 0.01 s" in message
    assert "min_" not in message


def test_what_a_request_may_ask_for_is_held_against_the_floor_too():
    message = check_slo(SloConfig(ttft_s=1.0, min_ttft_s=0.05), FLOOR)
    assert message is not None and message.startswith("slo.min_ttft_s promises 0.05 s")
