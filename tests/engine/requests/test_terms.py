"""What a request may ask for: promises and deadlines, checked and carried."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput

from echo_sgl.config import CONFIG_ENV, SloConfig
from echo_sgl.engine import settings
from echo_sgl.engine.http.tags import check_and_stamp
from echo_sgl.engine.requests.terms import (
    ARRIVAL_KEY,
    check_terms,
    stamped,
    terms_of,
    terms_of_headers,
)
from echo_sgl.errors import TermsError
from echo_sgl.types import Task


@pytest.fixture(autouse=True)
def active_config(tmp_path, monkeypatch):
    path = tmp_path / "config.toml"
    path.write_text("[slo]\nttft_s = 2.0\ntpot_s = 0.1\n")
    monkeypatch.setenv(CONFIG_ENV, str(path))
    settings.active_config.cache_clear()
    yield
    settings.active_config.cache_clear()


def request(**custom_params: object) -> SimpleNamespace:
    return SimpleNamespace(sampling_params=SimpleNamespace(custom_params=custom_params or None))


def test_a_request_without_terms_has_the_servers_promises():
    terms = terms_of(request(), now_s=7.0)
    assert (terms.task, terms.promise.ttft_s, terms.promise.tpot_s) == (Task.ONLINE, 2.0, 0.1)
    assert terms.arrival_s == 7.0
    assert math.isinf(terms.deadline_s)


def test_a_requests_own_terms_come_first():
    terms = terms_of(request(ttft_s=5.0, echo_arrival_s=100.0, service_tier="flex", deadline_s=60))
    assert terms.is_offline
    assert terms.promise.ttft_s == 5.0
    assert (terms.arrival_s, terms.deadline_s) == (100.0, 160.0)


def test_a_term_without_a_value_is_none():
    nothing = dict.fromkeys(("ttft_s", "tpot_s", "deadline_s", "service_tier"))
    check_terms(nothing, SloConfig())
    terms = terms_of(request(**nothing), now_s=7.0)
    assert (terms.task, terms.promise.ttft_s, terms.promise.tpot_s) == (Task.ONLINE, 2.0, 0.1)
    assert math.isinf(terms.deadline_s)


def test_terms_are_read_once():
    req = request(ttft_s=5.0)
    first = terms_of(req, now_s=1.0)
    assert terms_of(req, now_s=2.0) is first
    assert first.arrival_s == 1.0


def test_no_client_dates_its_own_arrival_back():
    params = stamped({"temperature": 0, "custom_params": {ARRIVAL_KEY: -5.0, "ttft_s": 3}})
    assert params["temperature"] == 0
    assert params["custom_params"]["ttft_s"] == 3
    assert params["custom_params"][ARRIVAL_KEY] > 0


@pytest.mark.parametrize(
    ("preferred", "given", "kept"),
    [
        (None, {}, {}),
        ({"temperature": 0}, {}, {}),
        ({"custom_params": {"bias": 7}}, {}, {"bias": 7}),
        ({"custom_params": {"bias": 7}}, {"custom_params": {"scale": 2}}, {"scale": 2}),
        ({"custom_params": {"bias": 7}}, {"custom_params": None}, {}),  # named, as by OpenAI's API
    ],
)
def test_a_stamp_takes_the_servers_preferred_parameters_from_nobody(preferred, given, kept):
    manager = SimpleNamespace(preferred_sampling_params=preferred)
    obj = SimpleNamespace(sampling_params={"top_k": 1, **given})
    check_and_stamp(manager, obj)
    assert obj.sampling_params["custom_params"].pop(ARRIVAL_KEY) > 0
    assert obj.sampling_params == {"top_k": 1, "custom_params": kept}


def test_text_that_a_model_of_embeddings_is_to_write_is_refused():
    request = GenerateReqInput(text="word", sampling_params={})
    manager = SimpleNamespace(is_generation=False, preferred_sampling_params=None)
    with pytest.raises(ValueError, match="gives embeddings"):
        check_and_stamp(manager, request)
    check_and_stamp(manager, EmbeddingReqInput(text="word", sampling_params={}))
    manager.is_generation = True
    check_and_stamp(manager, request)


@pytest.mark.parametrize("token", [-1, 500, 999_999])
def test_a_token_that_the_model_does_not_have_is_refused(token):
    manager = SimpleNamespace(
        is_generation=True,
        enable_lora=False,
        preferred_sampling_params=None,
        model_config=SimpleNamespace(vocab_size=500),
    )
    check_and_stamp(manager, GenerateReqInput(input_ids=[0, 499], sampling_params={}))
    for kind in (GenerateReqInput, EmbeddingReqInput):
        with pytest.raises(ValueError, match=rf"holds token {token}; .* are 0 to 499"):
            check_and_stamp(manager, kind(input_ids=[7, token, 7], sampling_params={}))
    image = GenerateReqInput(input_ids=[token], image_data=["an image"], sampling_params={})
    check_and_stamp(manager, image)
    manager.enable_lora = True
    check_and_stamp(manager, GenerateReqInput(input_ids=[token], sampling_params={}))


def test_the_servers_preferred_terms_are_checked_like_a_clients():
    manager = SimpleNamespace(preferred_sampling_params={"custom_params": {"ttft_s": "soon"}})
    with pytest.raises(TermsError, match="ttft_s is 'soon'"):
        check_and_stamp(manager, SimpleNamespace(sampling_params={}))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"ttft_s": 1.0}, "ttft_s is 1.0; allowed are seconds above 0, at least 2"),
        ({"tpot_s": 0.05}, "tpot_s is 0.05; .* at least 0.1"),
        ({"ttft_s": "fast"}, "ttft_s is 'fast'"),
        ({"ttft_s": True}, "ttft_s is True"),
        ({"ttft_s": float("nan")}, "ttft_s is nan"),
        ({"deadline_s": 0}, "deadline_s is 0; allowed are seconds above 0"),
        ({"deadline_s": -1}, "deadline_s is -1"),
        ({"deadline_s": 1e9}, "at most 2.592e\\+06"),
    ],
)
def test_terms_stricter_than_the_config_or_without_sense_are_refused(params, message):
    with pytest.raises(TermsError, match=message):
        check_terms(params, SloConfig(ttft_s=2.0, tpot_s=0.1))


def test_the_config_can_let_requests_ask_for_less():
    check_terms({"ttft_s": 0.5}, SloConfig(ttft_s=2.0, min_ttft_s=0.5))
    with pytest.raises(TermsError):
        check_terms({"ttft_s": 0.4}, SloConfig(ttft_s=2.0, min_ttft_s=0.5))


def test_headers_carry_terms():
    headers = {"x-echo-ttft-s": "3", "x-echo-deadline-s": "60.5", "x-other": "1"}
    assert terms_of_headers(headers) == {"ttft_s": 3.0, "deadline_s": 60.5}
    with pytest.raises(TermsError, match="x-echo-tpot-s is 'soon'"):
        terms_of_headers({"x-echo-tpot-s": "soon"})


@pytest.mark.parametrize(
    ("first_token_s", "end_s", "num_tokens", "is_met"),
    [
        (1.0, 1.5, 6, True),
        (2.5, 2.6, 6, False),
        (1.0, 3.0, 6, False),
        (None, 1.0, 1, True),
        (None, 3.0, 1, False),
    ],
)
def test_a_promise_is_kept_by_both_times(first_token_s, end_s, num_tokens, is_met):
    terms = terms_of(request(echo_arrival_s=0.0))
    terms.first_token_s = first_token_s
    assert terms.is_met(num_tokens, end_s) is is_met


@pytest.mark.parametrize(
    ("first_token_s", "num_tokens", "end_s", "is_met"),
    [(7.5, 6, 8.0, True), (7.5, 3, 7.9, False), (9.5, 3, 9.6, False), (None, 1, 8.9, True)],
)
def test_what_was_promised_is_judged_by_when_the_first_token_was_seen(
    first_token_s, num_tokens, end_s, is_met
):
    """Two seconds for the first one, 0.1 for each other; who ends before one was seen has one."""
    terms = terms_of(request(), now_s=7.0)
    if first_token_s is not None:
        terms.note_first_token(first_token_s, 400)
    assert terms.is_met(num_tokens, end_s) is is_met


@pytest.mark.parametrize("key", ["ttft_s", "tpot_s"])
def test_a_request_may_ask_for_less_time_as_far_as_the_config_allows(key):
    slo = SloConfig(**{key: 0.5, f"min_{key}": 0.2})
    check_terms({key: 0.2}, slo)
    with pytest.raises(TermsError):
        check_terms({key: 0.19}, slo)
    with pytest.raises(TermsError):
        check_terms({key: True}, slo)
