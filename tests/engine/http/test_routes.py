"""Echo's routes behind SGLang's own key check; the schedulers behind them are not asked here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.utils.auth import add_api_key_middleware

from echo_sgl.config import CONFIG_ENV
from echo_sgl.engine import settings
from echo_sgl.engine.http.routes import Replicas, put_routes
from echo_sgl.engine.questions import (
    BUDGET_KEY,
    FORGET_TRAFFIC_KEY,
    budget_problem,
    obey,
    set_budget,
)
from echo_sgl.policies.limits.online_attainment import BudgetController
from echo_sgl.policies.limits.step_limit import NoLimit, OnlineView
from echo_sgl.policies.limits.step_limits import BudgetLimit
from tests.policies.plans import planner

ROUTES = [
    ("GET", "/echo/steps"),
    ("GET", "/echo/trace"),
    ("GET", "/echo/recording"),
    ("GET", "/echo/requests/abc"),
    ("POST", "/echo/budget"),
    ("POST", "/echo/forget-traffic"),
]
KEY = {"Authorization": "Bearer secret"}
BUSY = OnlineView(now_s=0.0, decode_due_s=1.0, first_due_s=1.0, alone_s=0.0, is_present=True)


@pytest.fixture
def client(tmp_path, monkeypatch):
    path = tmp_path / "config.toml"
    path.write_text('[steps]\nlimit = "relative"\n')
    monkeypatch.setenv(CONFIG_ENV, str(path))
    settings.active_config.cache_clear()
    yield client_of(api_key="secret")
    settings.active_config.cache_clear()


def client_of(**keys: str | None) -> TestClient:
    app = FastAPI()
    put_routes(app, Replicas(None))
    add_api_key_middleware(app, **{"api_key": None, "admin_api_key": None} | keys)
    return TestClient(app)


def budget_limit() -> BudgetLimit:
    controller = BudgetController(0.3, target=0.9, minimum_s=0.1, maximum_s=1.0)
    return BudgetLimit(0.1, controller, adapts=True)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_route_answers_without_the_key(client, method, path):
    assert client.request(method, path).status_code == 401


@pytest.mark.parametrize("path", ["/echo/budget", "/echo/forget-traffic"])
@pytest.mark.parametrize("keys", [{"admin_api_key": "a"}, {"admin_api_key": "a", "api_key": "b"}])
def test_what_changes_the_server_wants_the_admin_key_where_there_is_one(client, path, keys):
    guarded = client_of(**keys)
    for given in ({}, {"Authorization": "Bearer b"}):
        assert guarded.post(path, headers=given).status_code in (401, 403)
    answer = guarded.post("/echo/budget", headers={"Authorization": "Bearer a"})
    assert answer.status_code == 400, "it is let in, and asked for a budget"


@pytest.mark.parametrize("body", [b"[" * 100_000, b"{", b"3", b"\xff"])
def test_a_body_that_is_no_budget_is_refused(client, body):
    assert client.post("/echo/budget", content=body, headers=KEY).status_code == 400


def test_a_budget_where_none_is_used_is_refused_with_what_to_do(client):
    answer = client.post("/echo/budget", json={"budget_s": 0.1}, headers=KEY)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "budget_s" and error["code"] == 400
    assert "steps.limit is 'relative'" in error["message"]


def test_an_id_longer_than_any_is_unknown_and_nobody_is_asked(client):
    answer = client.get(f"/echo/requests/{'x' * 600}", headers=KEY)
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("seconds", ["0", "-1", "1e9", "nan", "soon"])
def test_a_trace_of_no_time_or_too_much_is_refused(client, seconds):
    answer = client.get("/echo/trace", params={"seconds": seconds}, headers=KEY)
    assert answer.status_code in (400, 422)  # SGLang's app makes it 400


@pytest.mark.parametrize("given", [0, -1, 3601, float("nan"), float("inf"), True, "1", None, []])
def test_only_seconds_above_zero_are_a_budget(given):
    assert "allowed are seconds above 0" in (budget_problem("budget", given) or "")
    assert (
        not isinstance(given, float) or not set_budget(budget_limit(), {BUDGET_KEY: given}).updated
    )


def test_a_budget_that_was_set_stays_whatever_the_attainment():
    limit = budget_limit()
    assert set_budget(limit, {BUDGET_KEY: 0.02}).updated
    for _ in range(100):
        limit.note_request(False)
    assert limit.limit_s(BUSY) == 0.02


def test_other_limits_and_other_settings_are_left_alone():
    assert not set_budget(NoLimit(0.1), {BUDGET_KEY: 0.02}).updated
    assert set_budget(budget_limit(), {"max_micro_batch_size": 2}) is None


@pytest.mark.parametrize(
    "query",
    ["", "recording=short", f"recording={'A' * 32}", f"recording={'a' * 32}&after=1:x"],
)
def test_a_recording_names_itself_with_32_hex_digits_and_where_it_goes_on(client, query):
    assert client.get(f"/echo/recording?{query}", headers=KEY).status_code == 422


def test_what_was_no_traffic_moves_neither_reserve_nor_budget() -> None:
    limit, forgotten = budget_limit(), []
    limits = SimpleNamespace(forget_demand=lambda: forgotten.append("demand"))
    plan = planner()
    plan.limit = limit
    control = SimpleNamespace(planner=plan)
    for _ in range(30):  # a whole window that fell short, and half of the next one
        limit.note_request(False)
    assert limit.limit_s(BUSY) < 0.3
    obey(SimpleNamespace(kv_limits=limits, step_control=control), {FORGET_TRAFFIC_KEY: 1})
    assert limit.limit_s(BUSY) == 0.3
    assert forgotten == ["demand"]
    for _ in range(19):
        limit.note_request(False)
    assert limit.limit_s(BUSY) == 0.3, "requests of the half window do not count any more"
