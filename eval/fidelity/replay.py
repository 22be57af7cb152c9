"""Plays what a real run was sent to the simulated server, and records it as the client would."""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from echo_sgl.config import load_config
from echo_sgl.estimators.profile import Profile
from echo_sgl.sim.results import SimResults
from echo_sgl.sim.server import simulate
from echo_sgl.sim.server_config import NO_HOST_TIME, ServerConfig
from echo_sgl.sim.workload import SimRequest, Trace
from echo_sgl.types import Task
from eval.load.mix import Mix
from eval.load.records import Record, Status
from eval.workloads import WorkloadError
from eval.workloads.jobs import BatchLine
from eval.workloads.prompts import Tokenizer

MAX_NOISE = 0.5

Tree = dict[str, Any]
Bodies = dict[str, dict[str, Any]]


def server_config(profile: Profile, facts: Tree, config_path: Path) -> ServerConfig:
    """The simulated twin of a server: what it said of itself, and its config."""
    return ServerConfig(
        device=profile.estimator,
        kv_tokens=facts["max_total_tokens"],
        echo=load_config(config_path),
        page_tokens=facts["page_size"],
        max_running_requests=facts["max_running_requests"],
        chunked_prefill_tokens=facts["chunked_prefill_tokens"] or facts["max_prefill_tokens"],
        max_prefill_tokens=facts["max_prefill_tokens"],
        enable_mixed_chunk=facts["is_mixed_chunk"],
        overlap=not facts["disable_overlap_schedule"],
        schedule_conservativeness=facts["schedule_conservativeness"],
        host=profile.host or NO_HOST_TIME,
        noise=noise_of(profile),
    )


def noise_of(profile: Profile) -> float:
    """Standard deviation of steps' times, as a share: from the profile's held-out errors.

    A normal variable's mean absolute deviation is 0.8 of its standard deviation.
    """
    errors = profile.errors.values()
    num_steps = sum(error.num_steps for error in errors)
    mape = sum(error.mape * error.num_steps for error in errors) / max(1, num_steps)
    return min(MAX_NOISE, mape / math.sqrt(2 / math.pi))


def bodies_of(mix: Mix) -> Bodies:
    """What each request of the run asked for, by its id."""
    online = {f"online-{index}": body for index, body in enumerate(mix.online_bodies)}
    return online | {line["custom_id"]: line["body"] for line in mix.job}


def check_job(lines: Iterable[BatchLine]) -> None:
    """Before it is measured: can it be replayed? Errors: `WorkloadError` names the line."""
    for line in lines:
        for key, wanted in (("prompt", str), ("max_tokens", int)):
            value_of(line["custom_id"], line["body"], key, wanted)


def value_of(id: str, body: Mapping[str, Any], key: str, wanted: type) -> Any:
    """What a request says of that. Errors: `WorkloadError` when it says nothing."""
    if not isinstance(value := body.get(key), wanted):
        raise WorkloadError(
            f"{id} has {key} {value!r:.40}; a job is replayed whose lines are for "
            "/v1/completions, with a prompt of text and max_tokens"
        )
    return value


class Prompts:
    """Token ids of requests as their server makes them: a simulated prefix is a real one."""

    def __init__(self, bodies: Bodies, tokenizer: Tokenizer) -> None:
        self._bodies, self._tokenizer = bodies, tokenizer
        self._ids: dict[str, array[int]] = {}

    def ids(self, record: Record) -> array[int]:
        """Errors: `WorkloadError` when the server counted other tokens than we do."""
        if record.id not in self._ids:
            prompt = self._value(record, "prompt", str)
            self._ids[record.id] = array("q", self._tokenizer.encode(prompt))
        ids = self._ids[record.id]
        if record.status is Status.OK and record.prompt_tokens != len(ids):
            raise WorkloadError(
                f"{record.id} has {len(ids)} tokens here and had {record.prompt_tokens} on the "
                "server: these are not the prompts that were sent"
            )
        return ids

    def answer_tokens(self, record: Record) -> int:
        return int(self._value(record, "max_tokens", int))

    def ignores_eos(self, record: Record) -> bool:
        return bool(self._body(record).get("ignore_eos"))

    def _value(self, record: Record, key: str, wanted: type) -> Any:
        return value_of(record.id, self._body(record), key, wanted)

    def _body(self, record: Record) -> dict[str, Any]:
        if record.id not in self._bodies:
            raise WorkloadError(f"{record.id} was sent, and is not in the load of these options")
        return self._bodies[record.id]


def trace_of(records: Sequence[Record], task: Task, prompts: Prompts) -> Trace:
    """Requests of one class, in order of sending: one block per token, so nothing is rounded."""
    answers = array("q", (prompts.answer_tokens(one) for one in records))
    blocks = [prompts.ids(one) for one in records]
    return Trace(
        task,
        array("d", map(_sent_s, records)),
        array("q", map(len, blocks)),
        answers,
        blocks=blocks,
        block_tokens=1,
        max_new_tokens=max(answers, default=1),
        allowed_tokens=answers,
        ignores_eos=all(map(prompts.ignores_eos, records)),
    )


class Client:
    """Sees the simulated server as the load generator saw the real one.

    `sent`: the real records of each class in order of sending, the n-th being the simulated
    request number n.
    """

    def __init__(self, sent: dict[Task, list[Record]]) -> None:
        self._sent = sent
        self._seen: list[tuple[SimRequest, Record]] = []
        self._by_rid: dict[str, Record] = {}

    def came(self, request: SimRequest) -> None:
        real = self._sent[request.task][request.number]
        record = Record(real.id, real.task, real.scheduled_s, sent_s=real.sent_s)
        self._seen.append((request, record))
        self._by_rid[request.rid] = record

    def ended(self, request: SimRequest, num_tokens: int, now_s: float) -> None:
        record = self._by_rid[request.rid]
        record.prompt_tokens, record.completion_tokens = request.prompt_tokens, num_tokens
        record.cached_tokens = request.cached_tokens or 0
        record.last_token_s = now_s
        record.end(Status.OK, now_s)

    def records(self, end_s: float) -> list[Record]:
        """All that came; what was not answered by `end_s` was given up then."""
        for request, record in self._seen:
            record.first_token_s = request.first_token_s
            if record.status is Status.PENDING and request.first_token_s is not None:
                record.prompt_tokens = request.prompt_tokens
                record.completion_tokens, record.last_token_s = request.num_outputs, end_s
            record.end(Status.CANCELLED, end_s)
        return [record for _, record in self._seen]


def replay(
    config: ServerConfig,
    records: Sequence[Record],
    prompts: Prompts,
    *,
    end_s: float | None = None,
) -> tuple[list[Record], SimResults]:
    """The same requests at the same times on the simulated server.

    What it does not answer by `end_s` was given up then; None: by the end of the real phase.
    """
    sent = {
        task: sorted((r for r in records if r.task is task and r.sent_s is not None), key=_sent_s)
        for task in Task
    }
    if end_s is None:
        end_s = max(record.end_s or 0.0 for record in records)
    online, offline = (trace_of(sent[task], task, prompts) for task in (Task.ONLINE, Task.OFFLINE))
    client = Client(sent)
    results = simulate(config, online, offline, until_s=end_s, observer=client)
    return client.records(end_s), results


def with_unfinished(records: Sequence[Record], prompts: Prompts) -> list[Record]:
    """The same, where answers that were given up half way have the tokens that had come."""
    return [
        dataclasses.replace(
            one, prompt_tokens=len(prompts.ids(one)), completion_tokens=len(one.gaps_s) + 1
        )
        if one.status is Status.CANCELLED and one.first_token_s is not None
        else one
        for one in records
    ]


def _sent_s(record: Record) -> float:
    assert record.sent_s is not None
    return record.sent_s
