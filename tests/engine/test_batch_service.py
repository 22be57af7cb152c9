"""The batch service on a real server, through OpenAI's own client."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
from openai.types import Batch

from echo_sgl.config import KEYS_FILE_ENV, STATE_DIR_ENV
from eval.servers.server import CPU_ARGS, LOCAL, Server, start_server, stop_server, wait_ready
from tests.cli.jobs import run_cli
from tests.engine.traffic import metric, wait_until
from tests.servers import COMMON_ARGS, NAMED, STRICT

pytestmark = pytest.mark.server
KEY, ANN, BOB = "the-operators-key", "the-key-of-ann-0000", "the-key-of-bob-0000"
ENDED = ("failed", "completed", "expired", "cancelled")


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def keys_file(state_dir: Path) -> Path:
    path = state_dir / "keys.txt"
    path.write_text(f"# tenants\nann {ANN}\nbob {BOB}\n")
    return path


@pytest.fixture
def server(server_for: Callable[..., Server], state_dir: Path, keys_file: Path) -> Server:
    env = {STATE_DIR_ENV: str(state_dir / "state"), KEYS_FILE_ENV: str(keys_file)}
    return server_for(
        (*COMMON_ARGS, *NAMED, "--api-key", KEY), config="echo", env={**STRICT, **env}
    )


def client_of(server: Server, key: str = ANN) -> openai.OpenAI:
    return openai.OpenAI(
        api_key=key,
        base_url=f"{server.url}/v1",
        max_retries=0,
        _strict_response_validation=True,
    )


def line(custom_id: str, prompt: str | list[str], **body: Any) -> bytes:
    fields = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    return orjson.dumps(
        {
            "custom_id": custom_id,
            "method": "POST",
            "url": "/v1/completions",
            "body": fields | {"ignore_eos": True} | body,
        }
    )


def create(client: openai.OpenAI, lines: list[bytes], endpoint: str = "/v1/completions") -> Batch:
    file = client.files.create(file=("jobs.jsonl", b"\n".join(lines)), purpose="batch")
    return client.batches.create(
        input_file_id=file.id,
        endpoint=endpoint,
        completion_window="24h",  # type: ignore[arg-type]
    )


def ended(client: openai.OpenAI, batch_id: str) -> Batch:
    wait_until(lambda: client.batches.retrieve(batch_id).status in ENDED, f"{batch_id} ends")
    return client.batches.retrieve(batch_id)


def records(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    if file_id is None:
        return {}
    found = [orjson.loads(item) for item in client.files.content(file_id).content.splitlines()]
    by_id = {item["custom_id"]: item for item in found}
    assert len(by_id) == len(found)
    return by_id


def completed(client: openai.OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    assert counts is not None
    return counts.completed


def is_idle(server: Server) -> bool:
    return metric(server, "sglang:num_running_reqs") + metric(server, "echo_sgl_pool_requests") == 0


def test_the_whole_life_of_a_batch_on_a_real_server(server: Server) -> None:
    client = client_of(server)
    prefix = "def queue(item): return item\n" * 8
    lines = [line(f"line-{index}", f"{prefix}{index}") for index in range(40)]
    lines.append(line("too-long", "x", max_tokens=10**6))
    before = metric(server, "echo_sgl_requests_total", task="offline", outcome="finished")
    batch = ended(client, create(client, lines).id)
    assert batch.status == "completed"
    assert batch.model == "tiny"
    output, errors = records(client, batch.output_file_id), records(client, batch.error_file_id)
    assert set(output) == {f"line-{index}" for index in range(40)}
    assert set(errors) == {"too-long"}
    assert errors["too-long"]["response"]["status_code"] == 400
    assert "1000000 tokens" in errors["too-long"]["response"]["body"]["error"]["message"]
    assert batch.usage is not None
    assert batch.usage.output_tokens == 40 * 4
    assert 0 < batch.usage.input_tokens_details.cached_tokens < batch.usage.input_tokens
    after = metric(server, "echo_sgl_requests_total", task="offline", outcome="finished")
    assert after - before == 40
    direct = client.completions.create(
        model="tiny",
        prompt=f"{prefix}7",
        max_tokens=4,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    body = output["line-7"]["response"]["body"]
    assert body["choices"][0]["text"] == direct.choices[0].text


def test_chat_lines_are_answered_like_chat(server: Server) -> None:
    client = client_of(server)
    chat = orjson.loads(line("chat", "x"))
    chat["url"] = "/v1/chat/completions"
    del chat["body"]["prompt"]
    chat["body"]["messages"] = [{"role": "user", "content": "hello"}]
    batch = create(client, [orjson.dumps(chat)], "/v1/chat/completions")
    batch = ended(client, batch.id)
    answer = records(client, batch.output_file_id)["chat"]["response"]["body"]
    assert answer["choices"][0]["message"]["role"] == "assistant"


def test_lines_with_several_prompts_or_choices_are_answered(server: Server) -> None:
    client = client_of(server)
    lines = [line("two", "a", n=2), line("list", ["one", "two", "three"])]
    batch = ended(client, create(client, lines).id)
    output = records(client, batch.output_file_id)
    assert len(output["two"]["response"]["body"]["choices"]) == 2
    assert len(output["list"]["response"]["body"]["choices"]) == 3


def test_cancelling_ends_what_runs_within_seconds(server: Server) -> None:
    client = client_of(server)
    lines = [line(f"line-{index}", f"{index} text", max_tokens=3000) for index in range(60)]
    batch = create(client, lines)
    wait_until(lambda: metric(server, "sglang:num_running_reqs") > 0, "lines of the batch run")
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = ended(client, batch.id)
    assert batch.status == "cancelled"
    names = {*records(client, batch.output_file_id), *records(client, batch.error_file_id)}
    assert names == {f"line-{index}" for index in range(60)}
    wait_until(lambda: metric(server, "sglang:num_running_reqs") == 0, "nothing runs any more")
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_cancelling_a_line_of_many_prompts_ends_those_that_come_later_too(server: Server) -> None:
    client = client_of(server)
    prompts = [f"{index} text" * 50 for index in range(2000)]
    batch = create(client, [line("many", prompts, max_tokens=1000)])
    in_flight = "echo_sgl_batch_lines_in_flight"
    wait_until(lambda: metric(server, in_flight) > 0, "its prompts are being sent")
    client.batches.cancel(batch.id)
    assert ended(client, batch.id).status == "cancelled"
    wait_until(lambda: is_idle(server), "nothing runs or waits any more")


def test_keys_of_tenants_open_their_own_jobs_and_inference_but_no_administration(
    server: Server,
) -> None:
    ann, bob = client_of(server), client_of(server, BOB)
    batch = create(ann, [line("a", "hello")])
    with pytest.raises(openai.NotFoundError):
        bob.batches.retrieve(batch.id)
    with pytest.raises(openai.NotFoundError):
        bob.files.content(batch.input_file_id)
    assert [item.id for item in bob.batches.list()] == []
    assert bob.completions.create(model="tiny", prompt="hi", max_tokens=1).choices
    with pytest.raises(openai.AuthenticationError) as caught:
        client_of(server, "wrong").batches.list()
    assert caught.value.code == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        client_of(server, "wrong").models.list()
    for path in ("/flush_cache", "/abort_request", "/generate", "/echo/steps"):
        answer = LOCAL.post(server.url + path, headers={"Authorization": f"Bearer {BOB}"}, json={})
        assert answer.status_code == 401, path
    assert ended(ann, batch.id).status == "completed"


def test_batch_run_hands_a_file_over_to_the_server(server: Server, tmp_path: Path) -> None:
    jobs, output = tmp_path / "jobs.jsonl", tmp_path / "out.jsonl"
    jobs.write_bytes(b"\n".join(line(f"line-{index}", f"text {index}") for index in range(12)))
    result = run_cli(
        "batch", "run", "-i", jobs, "-o", output, "--url", server.url, "--api-key", BOB, "--json"
    )
    assert result.returncode == 0, result.stderr
    assert orjson.loads(result.stdout)["batch_id"].startswith("batch_")
    found = [orjson.loads(item)["custom_id"] for item in output.read_bytes().splitlines()]
    assert sorted(found) == sorted(f"line-{index}" for index in range(12))


def test_a_batch_whose_requests_an_operator_aborts_is_answered_whole(server: Server) -> None:
    client = client_of(server)
    batch = create(
        client, [line(f"line-{index}", f"{index} a", max_tokens=30) for index in range(40)]
    )
    wait_until(lambda: completed(client, batch.id) > 0, "lines are done")
    answer = LOCAL.post(
        f"{server.url}/abort_request",
        json={"abort_all": True},
        headers={"Authorization": f"Bearer {KEY}"},
    )
    assert answer.status_code == 200
    batch = ended(client, batch.id)
    assert batch.status == "completed"
    assert len(records(client, batch.output_file_id)) == 40


def test_without_a_state_directory_the_routes_are_absent(echo_server: Server) -> None:
    for path in ("/v1/batches", "/v1/files"):
        assert LOCAL.get(echo_server.url + path).status_code == 404


@pytest.mark.slow
def test_a_killed_server_goes_on_where_it_was(tmp_path: Path, tiny_model: Path) -> None:
    """Killed while it runs lines, then stopped politely, then left to finish."""
    names = {f"line-{index}" for index in range(120)}
    lines = [line(name, f"{name} of the job", max_tokens=40) for name in sorted(names)]
    env = {STATE_DIR_ENV: str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}
    args = (*CPU_ARGS, *COMMON_ARGS, *NAMED, "--random-seed", "0")

    def start(round_number: int) -> Server:
        log_path = tmp_path / f"server-{round_number}.log"
        server = start_server(tiny_model, args, config="echo", env=env, log_path=log_path)
        wait_ready(server)
        return server

    server = start(0)
    try:
        client = client_of(server)
        batch = create(client, lines)
        wait_until(lambda: completed(client, batch.id) >= 20, "some lines are done")
        done = completed(client, batch.id)
        os.killpg(server.process.pid, signal.SIGKILL)
        stop_server(server)
        server = start(1)
        client = client_of(server)
        assert completed(client, batch.id) >= done
        wait_until(lambda: completed(client, batch.id) >= done + 20, "it goes on")
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(90)
        assert "unfinished lines are kept" in server.log()
        stop_server(server)
        server = start(2)
        client = client_of(server)
        batch = ended(client, batch.id)
        assert batch.status == "completed"
        assert set(records(client, batch.output_file_id)) == names
        assert batch.error_file_id is None
    finally:
        stop_server(server)
