"""The life of batches through OpenAI's own client, strict about every object, on a stub model."""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
from pathlib import Path
from typing import Any

import openai
import pytest

from echo_sgl.batches.store.database import DATABASE_NAME
from tests.batches.client import Stub, job, line


def test_a_batch_is_created_worked_through_and_its_results_downloaded(live) -> None:
    async def life(stub: Stub) -> None:
        prompts = [f"prompt {index % 7}" for index in range(300)]
        prompts += ["bad one", "refuse 2", "break 1"]
        batch = await stub.create(job(prompts))
        assert batch.status == "validating"
        batch = await stub.ended(batch.id)
        assert batch.status == "completed"
        assert batch.model == "stub"
        assert batch.request_counts is not None
        assert (batch.request_counts.total, batch.request_counts.completed) == (303, 302)
        assert batch.usage is not None
        assert batch.usage.input_tokens == 3020
        assert batch.usage.input_tokens_details.cached_tokens == 4 * 302
        assert batch.usage.total_tokens == 12 * 302
        output = await stub.records(batch.output_file_id)
        errors = await stub.records(batch.error_file_id)
        assert set(errors) == {"line-300"}
        assert errors["line-300"]["response"]["status_code"] == 400
        assert errors["line-300"]["response"]["body"]["error"]["message"] == "made up: bad one"
        assert set(output) | set(errors) == {f"line-{index}" for index in range(303)}
        for name, record in output.items():
            answer = record["response"]["body"]["choices"][0]["text"]
            assert answer == prompts[int(name.removeprefix("line-"))][::-1]
            assert record["id"].startswith("batch_req_")
            assert record["error"] is None
        times = (batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at)
        assert None not in times
        assert list(times) == sorted(times)
        file = await stub.client.files.retrieve(str(batch.output_file_id))
        assert (file.purpose, file.status) == ("batch_output", "processed")
        assert file.bytes == len((await stub.client.files.content(file.id)).content)
        assert file.expires_at == pytest.approx(file.created_at + 30 * 86_400, abs=2)

    live(life)


def test_the_window_bounds_what_is_in_the_engine(live_sqlite) -> None:
    async def life(stub: Stub) -> None:
        batch = await stub.create(job(["hello"] * 60))
        await stub.ended(batch.id)
        assert stub.model.max_running == 7

    live_sqlite(life, window_lines=7, delay_s=0.005)


@pytest.mark.parametrize(
    ("body", "most"),
    [({"n": 3}, 2), ({"n": 10}, 1), ({"prompt": ["a", "b"], "n": 2}, 1), ({"prompt": [1, 2]}, 7)],
)
def test_each_answer_that_a_line_asks_for_takes_a_place_in_the_window(
    live_sqlite, body: dict[str, Any], most: int
) -> None:
    body = {"model": "stub", "prompt": "hello"} | body

    async def life(stub: Stub) -> None:
        batch = await stub.create(b"\n".join(line(f"{index}", body=body) for index in range(20)))
        ended = await stub.ended(batch.id)
        assert len(await stub.records(ended.output_file_id)) == 20
        assert stub.model.max_running == most

    live_sqlite(life, window_lines=7, delay_s=0.005)


def test_a_window_in_tokens_lets_one_large_line_pass_alone(live_sqlite) -> None:
    async def life(stub: Stub) -> None:
        batch = await stub.create(job(["hello " * 50] * 12))
        assert (await stub.ended(batch.id)).status == "completed"
        assert stub.model.max_running == 1

    live_sqlite(life, window_tokens=10, delay_s=0.002)


def test_a_job_whose_lines_fill_the_window_one_by_one_shares_it_with_others(live_sqlite) -> None:
    async def life(stub: Stub) -> None:
        large = await stub.create(job(["hello " * 50] * 60))
        await stub.until(large.id, lambda found: found.request_counts.completed > 0)
        small = await stub.create(job(["hello " * 50] * 5))
        assert (await stub.ended(small.id)).status == "completed"
        found = await stub.client.batches.retrieve(large.id)
        assert found.status == "in_progress"
        assert (await stub.ended(large.id)).status == "completed"

    live_sqlite(life, window_tokens=10, delay_s=0.02)


def test_a_file_with_bad_lines_uploads_and_its_batch_fails_with_their_numbers(live) -> None:
    async def life(stub: Stub) -> None:
        content = b"\n".join(
            [line("a"), b"{", line("a"), line("b", url="/v1/chat/completions"), line("c")]
        )
        batch = await stub.ended((await stub.create(content)).id)
        assert batch.status == "failed"
        assert batch.failed_at is not None
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert [(error.line, error.code) for error in batch.errors.data] == [
            (2, "invalid_json_line"),
            (3, "duplicate_custom_id"),
            (4, "invalid_body"),
        ]
        assert batch.output_file_id is None
        assert batch.error_file_id is None

    live(life)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "empty_file"),
        (b"\n\n \n", "empty_file"),
        (job(["a"] * 11), "too_many_lines"),
        (line("a", url="/v1/chat/completions", body={"model": "stub", "messages": []}), "url"),
        (line("a", body={"model": "other", "prompt": "x"}), "model_not_found"),
    ],
)
def test_a_file_that_cannot_be_a_batch_fails_with_the_reason(live_sqlite, content, code) -> None:
    async def life(stub: Stub) -> None:
        batch = await stub.ended((await stub.create(content)).id)
        assert batch.status == "failed"
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert code in str(batch.errors.data[0].code)

    live_sqlite(life, max_lines=10)


def test_cancelling_keeps_what_is_answered_and_names_the_rest(live) -> None:
    async def life(stub: Stub) -> None:
        batch = await stub.create(job(["hello"] * 30 + ["slow"] * 30))
        counted = await stub.until(
            batch.id,
            lambda batch: batch.request_counts is not None and batch.request_counts.completed == 30,
        )
        assert counted.status == "in_progress"
        cancelled = await stub.client.batches.cancel(batch.id)
        assert cancelled.status in ("cancelling", "cancelled")
        batch = await stub.ended(batch.id)
        assert batch.status == "cancelled"
        assert batch.cancelling_at is not None
        assert len(await stub.records(batch.output_file_id)) == 30
        errors = await stub.records(batch.error_file_id)
        assert len(errors) == 30
        assert {item["error"]["code"] for item in errors.values()} == {"batch_cancelled"}
        assert stub.model.num_running == 0
        with pytest.raises(openai.ConflictError, match="is cancelled"):
            await stub.client.batches.cancel(batch.id)

    live(life)


def test_a_cancelled_batch_can_be_retried_where_it_stopped(live) -> None:
    async def life(stub: Stub) -> None:
        batch = await stub.create(job(["hello"] * 5 + ["refuse 1000000"] + ["slow"]))
        await stub.until(
            batch.id,
            lambda batch: batch.request_counts is not None and batch.request_counts.completed == 5,
        )
        await stub.client.batches.cancel(batch.id)
        await stub.ended(batch.id)
        answer = await stub.http().post(f"/v1/batches/{batch.id}/retry")
        assert answer.status_code == 200
        assert answer.json()["status"] == "in_progress"
        assert answer.json()["request_counts"] == {"total": 7, "completed": 5, "failed": 0}
        again = await stub.http().post(f"/v1/batches/{batch.id}/retry")
        assert again.status_code == 409
        await stub.client.batches.cancel(batch.id)
        batch = await stub.ended(batch.id)
        assert len(await stub.records(batch.output_file_id)) == 5
        assert len(await stub.records(batch.error_file_id)) == 2

    live(life)


def test_failed_lines_are_retried_and_the_new_files_hold_every_line(live_sqlite) -> None:
    async def life(stub: Stub) -> None:
        batch = await stub.create(job(["hello"] * 4 + ["break 3"]))
        first = await stub.ended(batch.id)
        assert len(await stub.records(first.error_file_id)) == 1
        await stub.http().post(f"/v1/batches/{batch.id}/retry")
        second = await stub.ended(batch.id)
        assert len(await stub.records(second.output_file_id)) == 5
        assert second.error_file_id is None
        with pytest.raises(openai.NotFoundError):
            await stub.client.files.retrieve(str(first.error_file_id))
        answer = await stub.http().post(f"/v1/batches/{batch.id}/retry")
        assert answer.status_code == 409
        assert "nothing to retry" in answer.json()["error"]["message"]

    live_sqlite(life, max_line_attempts=2)


def test_a_batch_whose_answers_were_deleted_cannot_be_retried(live_sqlite) -> None:
    async def life(stub: Stub) -> None:
        batch = await stub.ended((await stub.create(job(["hello", "bad"]))).id)
        await stub.client.files.delete(str(batch.output_file_id))
        answer = await stub.http().post(f"/v1/batches/{batch.id}/retry")
        assert answer.status_code == 409
        assert f"{batch.output_file_id} of this batch is gone" in answer.json()["error"]["message"]
        assert len(await stub.records(batch.error_file_id)) == 1

    live_sqlite(life)


def test_a_window_that_is_over_expires_the_batch_and_keeps_the_finished_lines(
    live_sqlite, tmp_path: Path
) -> None:
    async def life(stub: Stub) -> None:
        batch = await stub.create(job(["hello"] * 8 + ["slow"] * 8))
        await stub.until(
            batch.id,
            lambda batch: batch.request_counts is not None and batch.request_counts.completed == 8,
        )
        with contextlib.closing(sqlite3.connect(tmp_path / "state" / DATABASE_NAME)) as database:
            database.execute("UPDATE batches SET expires_at_s = created_at_s")
            database.commit()
        batch = await stub.ended(batch.id)
        assert batch.status == "expired"
        assert batch.expired_at is not None
        assert len(await stub.records(batch.output_file_id)) == 8
        errors = await stub.records(batch.error_file_id)
        assert {item["error"]["code"] for item in errors.values()} == {"batch_expired"}
        assert len(errors) == 8
        assert stub.model.num_running == 0

    live_sqlite(life)


def test_a_paused_batch_sends_nothing_until_it_is_resumed(live) -> None:
    async def life(stub: Stub) -> None:
        http = stub.http()
        file_id = await stub.upload(job(["hello"] * 100))
        batch = await stub.client.batches.create(
            input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
        )
        paused = await http.post(f"/v1/batches/{batch.id}/pause")
        assert paused.json()["paused_at"] is not None
        other = await stub.create(job(["hello"] * 100))
        await stub.ended(other.id)
        waiting = await stub.client.batches.retrieve(batch.id)
        assert waiting.status == "in_progress"
        assert waiting.request_counts is not None
        assert waiting.request_counts.completed < 100
        resumed = await http.post(f"/v1/batches/{batch.id}/resume")
        assert resumed.json()["paused_at"] is None
        batch = await stub.ended(batch.id)
        assert len(await stub.records(batch.output_file_id)) == 100

    live(life, delay_s=0.01, window_lines=8)


def test_lines_are_sent_as_offline_work_with_an_id_of_ours(live_sqlite) -> None:
    async def life(stub: Stub) -> None:
        seen: list[dict[str, Any]] = []
        answer = stub.model.answer

        async def look(body: dict[str, Any]) -> Any:
            seen.append(body)
            return await answer(body)

        stub.model.answer = look  # type: ignore[method-assign]
        body = {"model": "stub", "prompt": "x", "rid": "mine", "service_tier": "priority"}
        await stub.ended((await stub.create(line("a", body=body))).id)
        assert seen[0]["service_tier"] == "flex"
        assert seen[0]["rid"].startswith("batch_req_")
        assert set(seen[0]) == set(body)

    live_sqlite(life)


def test_lines_with_a_common_prefix_are_sent_one_after_the_other(live_sqlite) -> None:
    async def life(stub: Stub) -> None:
        prompts = [f"{index % 4} {'document ' * 20} question {index}" for index in range(40)]
        seen: list[str] = []
        answer = stub.model.answer

        async def look(body: dict[str, Any]) -> Any:
            seen.append(body["prompt"].split(" question")[0])
            return await answer(body)

        stub.model.answer = look  # type: ignore[method-assign]
        await stub.ended((await stub.create(job(prompts))).id)
        assert sum(one != two for one, two in itertools.pairwise(seen)) == 3

    live_sqlite(life, window_lines=1)
