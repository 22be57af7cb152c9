"""Schemathesis holds the routes against their OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from tests.batches.client import job
from tests.cli.stubs import StubServer

NUM_CASES = 12
KEY = {"Authorization": "Bearer a-key-of-the-operator"}
CONFIG = "[batches]\nmax_uploads_per_minute = 1000000\nmax_open_batches = 100000\n"
OPERATIONS = (
    "POST /v1/files",
    "GET /v1/files",
    "GET /v1/files/{file_id}",
    "GET /v1/files/{file_id}/content",
    "DELETE /v1/files/{file_id}",
    "POST /v1/batches",
    "GET /v1/batches",
    "GET /v1/batches/{batch_id}",
    "POST /v1/batches/{batch_id}/pause",
    "POST /v1/batches/{batch_id}/resume",
    "POST /v1/batches/{batch_id}/cancel",
    "POST /v1/batches/{batch_id}/retry",
)
BOUNDED = settings(
    max_examples=NUM_CASES,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a server that asks for a key."""
    folder = tmp_path_factory.mktemp("stub")
    (folder / "echo.toml").write_text(CONFIG)
    state = ("--state-dir", str(folder / "state"), "--config", str(folder / "echo.toml"))
    server = StubServer(folder, *state, "--api-key", KEY["Authorization"].split()[1])
    server.start()
    with httpx.Client(base_url=server.url, headers=KEY, timeout=60) as client:
        yield client
    server.stop()


@pytest.fixture(scope="module")
def schema(http: httpx.Client) -> schemathesis.BaseSchema:
    document = schemathesis.openapi.from_url(f"{http.base_url}/openapi.json")
    return document.include(path_regex="^/v1/(files|batches)")


@pytest.fixture
def existing(http: httpx.Client) -> dict[str, str]:
    """A file, and a batch that runs for longer than the test."""
    upload = {"file": ("jobs.jsonl", job(["slow"]))}
    file = http.post("/v1/files", data={"purpose": "batch"}, files=upload).json()["id"]
    fields = {"endpoint": "/v1/completions", "completion_window": "24h"}
    batch = http.post("/v1/batches", json={"input_file_id": file, **fields}).json()["id"]
    unread = http.post("/v1/files", data={"purpose": "batch"}, files=upload).json()["id"]
    return {"file_id": unread, "batch_id": batch}


def check(
    operation: schemathesis.APIOperation, mode: GenerationMode, ids: dict[str, str] | None
) -> set[int]:
    """Call the operation with generated requests; the statuses that it answered with."""
    statuses: set[int] = set()
    load_all_checks()
    # As OpenAI's, our routes ignore parameters of a query that they do not know.
    is_loose = bool(operation.query) and mode is GenerationMode.NEGATIVE
    excluded = CHECKS.get_by_names(["negative_data_rejection"]) if is_loose else []
    given_ids = {} if ids is None else {"path_parameters": ids}

    @seed(6)
    @BOUNDED
    @given(case=operation.as_strategy(mode, **given_ids))
    def call(case: schemathesis.Case) -> None:
        answer = case.call(headers=KEY)
        case.validate_response(answer, excluded_checks=excluded)
        assert answer.status_code < 500
        # `4XX` is in the document too, but what a route is known to answer must be named.
        assert str(answer.status_code) in operation.definition.raw["responses"]
        statuses.add(answer.status_code)

    call()
    return statuses


def test_all_routes_are_held_against_the_document(schema: schemathesis.BaseSchema) -> None:
    labels = [result.ok().label for result in schema.get_all_operations()]
    assert sorted(labels) == sorted(OPERATIONS)


@pytest.mark.parametrize("label", OPERATIONS)
def test_answers_to_any_request_are_as_the_document_says(
    schema: schemathesis.BaseSchema, label: str
) -> None:
    operation = schema.find_operation_by_label(label)
    assert operation is not None
    assert check(operation, GenerationMode.POSITIVE, None) <= {200, 404}
    assert check(operation, GenerationMode.NEGATIVE, None) & {400, 401, 404}


@pytest.mark.parametrize("label", [label for label in OPERATIONS if "{" in label])
def test_answers_about_what_exists_are_as_the_document_says(
    schema: schemathesis.BaseSchema, existing: dict[str, str], label: str
) -> None:
    operation = schema.find_operation_by_label(label)
    assert operation is not None
    name = next(parameter.name for parameter in operation.path_parameters)
    statuses = check(operation, GenerationMode.POSITIVE, {name: existing[name]})
    assert statuses <= {200, 404, 409}
    assert (200 in statuses) is (not label.endswith("retry"))
