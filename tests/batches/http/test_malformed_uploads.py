"""Whatever is uploaded, the answer is a clear state: never a 500, never a crash, never a leak."""

from __future__ import annotations

import asyncio
import json
import urllib.parse
from pathlib import Path

import httpx
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from echo_sgl.batches.http.uploads import clean_filename
from echo_sgl.batches.lines.check_upload import MAX_PROBLEMS_BYTES, CheckRules, report
from echo_sgl.batches.lines.job_line import LineError, parse_line
from echo_sgl.batches.lines.prefix_order import prefix_key, prompt_bytes
from eval.servers.stub_server import MODEL
from tests.batches.client import Stub, running_stub
from tests.batches.malformed import GOOD, MALFORMED, NAMES, UNUSUAL, line

RULES = CheckRules("/v1/completions", {MODEL: MODEL}, 1000)


def test_the_corpus_is_large() -> None:
    assert len(MALFORMED) + len(UNUSUAL) + len(NAMES) >= 100
    assert len(MALFORMED) >= 60


def test_every_malformed_upload_fails_with_its_code_and_leaves_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_stub(tmp_path, max_lines=1000, max_open_batches=1000) as stub:
            created = {name: await stub.create(content) for name, (content, _) in MALFORMED.items()}
            for name, batch in created.items():
                ended = await stub.ended(batch.id)
                assert ended.status == "failed", name
                assert ended.errors is not None
                problems = ended.errors.data
                assert problems, name
                assert MALFORMED[name][1] in str(problems[0].code), (name, problems[0])
                assert all(problem.message for problem in problems)
                assert len(problems) <= 100
                assert all(len(str(problem.message)) < 400 for problem in problems), name
                await stub.client.files.delete(batch.input_file_id)
            left = [path.name for path in (tmp_path / "files").iterdir()]
            assert left == []
            assert stub.model.max_running == 0

    asyncio.run(main())


def test_unusual_but_right_uploads_are_answered(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_stub(tmp_path) as stub:
            created = {name: await stub.create(content) for name, content in UNUSUAL.items()}
            for name, batch in created.items():
                ended = await stub.ended(batch.id)
                assert ended.status == "completed", (name, ended.errors)
                assert ended.error_file_id is None, name
                assert await stub.records(ended.output_file_id), name

    asyncio.run(main())


def test_file_names_are_shown_and_never_used(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_stub(tmp_path / "state") as stub:
            for name in NAMES:
                uploaded = await raw_upload(stub, filename=name.encode())
                assert uploaded.status_code == 200, (name, uploaded.text)
                file = uploaded.json()
                assert file["filename"]
                assert len(file["filename"]) <= 255
                assert file["filename"].isprintable()
                content = await stub.client.files.content(file["id"])
                assert content.content == GOOD
            stored = {path.name for path in (tmp_path / "state" / "files").iterdir()}
            assert all(name.startswith("file-") and len(name) == 37 for name in stored)
            assert {path.name for path in tmp_path.iterdir()} == {"state"}

    asyncio.run(main())


async def raw_upload(stub: Stub, *, filename: bytes = b"a.jsonl") -> httpx.Response:
    quoted = filename.replace(b"\\", b"\\\\").replace(b'"', b"%22").replace(b"\r\n", b"  ")
    quoted = quoted.replace(b"\0", b" ")
    form = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="%b"\r\n\r\n%b\r\n--b--\r\n'
    ) % (quoted, GOOD)
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    return await stub.http().post("/v1/files", content=form, headers=headers)


PART = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
FILE = PART.replace(b'"%b"\r\n', b'"file"; filename="a"\r\n', 1) % b"{}"
PURPOSE = PART % (b"purpose", b"batch")
END = b"--b--\r\n"
BAD_FORMS = {
    "nothing": b"",
    "no part": END,
    "no file": PURPOSE + END,
    "no purpose": FILE + END,
    "purpose of something else": PART % (b"purpose", b"fine-tune") + FILE + END,
    "cut": (PURPOSE + FILE)[:-10],
    "no last boundary": PURPOSE + FILE,
    "two files": PURPOSE + FILE + FILE + END,
    "another boundary": (PURPOSE + FILE + END).replace(b"--b", b"--c"),
    "a field without end": PART % (b"purpose", b"x" * 100_000) + END,
    "fields without end": b"".join(PART % (b"f%d" % i, b"x") for i in range(100)) + FILE + END,
    "one field again and again": PART % (b"purpose", b"batch") * 100 + FILE + END,
    "a header without end": b"--b\r\n" + b"X-Long: " + b"y" * 1_000_000 + b"\r\n\r\n" + END,
    "headers without end": b"--b\r\n" + b"X-H: y\r\n" * 100_000 + b"\r\n" + END,
    "no name": b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n" + END,
    "no disposition": b"--b\r\n\r\nx\r\n" + END,
    "expires too early": PURPOSE
    + PART % (b"expires_after[anchor]", b"created_at")
    + PART % (b"expires_after[seconds]", b"5")
    + FILE
    + END,
    "expires at a word": PURPOSE
    + PART % (b"expires_after[anchor]", b"created_at")
    + PART % (b"expires_after[seconds]", b"soon")
    + FILE
    + END,
    "text before": b"garbage" * 100 + PURPOSE + FILE + END,
}


def test_forms_that_are_none_are_refused_with_a_reason_and_leave_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_stub(tmp_path) as stub:
            http = stub.http()
            kinds = {
                name: ("multipart/form-data; boundary=b", content)
                for name, content in BAD_FORMS.items()
            }
            kinds["json"] = ("application/json", b'{"purpose": "batch"}')
            kinds["no boundary"] = ("multipart/form-data", PURPOSE + FILE + END)
            kinds["long boundary"] = (f"multipart/form-data; boundary={'b' * 5000}", b"x")
            kinds["no type"] = ("", PURPOSE + FILE + END)
            for name, (kind, content) in kinds.items():
                headers = {"Content-Type": kind}
                answer = await http.post("/v1/files", content=content, headers=headers)
                assert answer.status_code == 400, (name, answer.text)
                assert answer.json()["error"]["message"], name
            assert [path.name for path in (tmp_path / "files").iterdir()] == []

    asyncio.run(main())


@given(st.binary(max_size=3000))
@settings(max_examples=200)
def test_any_bytes_are_a_usable_line_or_a_line_error(raw: bytes) -> None:
    try:
        line = parse_line(raw)
        prefix_key(line, prompt_bytes(line))
    except LineError as error:
        assert error.code
        assert str(error)


def test_the_problems_that_are_kept_are_bounded_in_bytes_and_the_first_ones_come_first(
    tmp_path: Path,
) -> None:
    path = tmp_path / "upload.jsonl"
    path.write_bytes(b"\n".join([line(method="🔑" * 10**5)] * 500))
    found = orjson.loads(next(iter(report(path, RULES))))["problems"]
    assert [problem["line"] for problem in found] == list(range(1, len(found) + 1))
    assert len(found) > 50
    assert len(orjson.dumps(found)) < MAX_PROBLEMS_BYTES + 1000


@pytest.mark.parametrize(("num_models", "code"), [(300, None), (400, "too_many_models")])
def test_the_models_that_are_kept_with_a_batch_are_bounded_in_bytes(
    tmp_path: Path, num_models: int, code: str | None
) -> None:
    path = tmp_path / "upload.jsonl"
    names = [f"adapter-{index:092}" for index in range(num_models)]
    bodies = [{"model": name, "prompt": "hello"} for name in names]
    path.write_bytes(
        b"\n".join(line(custom_id=str(index), body=body) for index, body in enumerate(bodies))
    )
    rules = CheckRules(RULES.endpoint, {name: name for name in names}, 1000)
    head, *entries = map(orjson.loads, report(path, rules))
    if code is None:
        assert (head["models"], len(entries)) == (names, num_models)
        return
    [problem] = head["problems"]
    assert (problem["code"], head["models"], entries) == (code, [], [])
    assert "Split the file by model" in problem["message"]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner),
    max_leaves=12,
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "custom_id": st.just("a") | VALUES,
        "method": st.just("POST") | VALUES,
        "url": st.sampled_from(["/v1/completions", "/v1/chat/completions"]) | VALUES,
        "body": st.fixed_dictionaries(
            {"model": st.just(MODEL) | VALUES},
            optional={"prompt": VALUES, "messages": VALUES, "max_tokens": VALUES, "tools": VALUES},
        )
        | VALUES,
    },
)


@given(st.lists(FIELDS, max_size=6), st.binary(max_size=40))
@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_file_is_checked_to_a_report(
    tmp_path: Path, documents: list[dict[str, object]], noise: bytes
) -> None:
    path = tmp_path / "upload.jsonl"
    lines = [json.dumps(document).encode() for document in documents]
    path.write_bytes(b"\n".join(lines) + b"\n" + noise)
    head, *entries = report(path, RULES)
    found = orjson.loads(head)
    assert found["problems"] or found["num_lines"] == len(entries) > 0
    assert all(problem["code"] and problem["message"] for problem in found["problems"])


NAMED = st.fixed_dictionaries(
    {},
    optional={
        "input_file_id": VALUES,
        "endpoint": st.just("/v1/completions") | VALUES,
        "completion_window": st.just("24h") | VALUES,
        "metadata": VALUES,
        "output_expires_after": VALUES,
    },
)
IDS = st.text(max_size=60).map(lambda text: urllib.parse.quote(text, safe="")) | st.just("batch_0")


@given(bodies=st.lists(NAMED | VALUES, max_size=8), ids=st.lists(IDS, max_size=6), after=st.text())
@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_request_is_answered_in_openais_envelope(
    tmp_path_factory: pytest.TempPathFactory, bodies: list[object], ids: list[str], after: str
) -> None:
    async def main() -> None:
        async with running_stub(tmp_path_factory.mktemp("state")) as stub:
            http = stub.http()
            contents = [json.dumps(body).encode() for body in bodies]
            answers = [await http.post("/v1/batches", content=content) for content in contents]
            for name in filter(None, ids):
                if name in (".", ".."):
                    continue
                answers += [await http.get(f"/v1/batches/{name}")]
                answers += [await http.post(f"/v1/batches/{name}/cancel")]
                answers += [await http.get(f"/v1/files/{name}/content")]
                answers += [await http.delete(f"/v1/files/{name}")]
            params = {"after": after, "limit": after}
            answers += [await http.get("/v1/files", params=params)]
            for answer in answers:
                assert answer.status_code in (400, 404, 405), (answer.request.url, answer.text)
                if "/" not in answer.request.url.path.removeprefix("/v1/"):
                    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    asyncio.run(main())


@given(st.binary(max_size=600))
def test_a_clean_name_is_short_printable_and_not_empty(given_name: bytes) -> None:
    name = clean_filename(given_name)
    assert 0 < len(name) <= 255
    assert name.isprintable()


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 1_000_000])
def test_uploads_arrive_whole_however_they_are_cut(tmp_path: Path, size: int) -> None:
    async def main() -> None:
        async with running_stub(tmp_path) as stub:
            data = b"--b\r\n-" * (size // 7) + b"x" * (size % 7)
            form = PURPOSE + FILE[:-4] + data + b"\r\n" + b"--bb--\r\n"
            form = form.replace(b"--b\r\nContent", b"--bb\r\nContent")

            async def pieces():  # type: ignore[no-untyped-def]
                for start in range(0, len(form), 4097):
                    yield form[start : start + 4097]

            headers = {"Content-Type": "multipart/form-data; boundary=bb"}
            answer = await stub.http().post("/v1/files", content=pieces(), headers=headers)
            assert answer.status_code == 200, answer.text
            file = answer.json()
            assert file["bytes"] == len(data)
            assert (await stub.client.files.content(file["id"])).content == data

    asyncio.run(main())
