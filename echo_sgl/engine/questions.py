"""What Echo's routes ask a scheduler, and its answers.

They ride SGLang's own requests for a scheduler's state, which the leader of every replica
answers, and for setting it, which SGLang broadcasts, so that all ranks take it in the same step.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, cast

from sglang.srt.managers.io_struct import GetInternalStateReqOutput, SetInternalStateReqOutput
from sglang.srt.runtime_context import get_parallel

from echo_sgl.batch_shape import BatchRow
from echo_sgl.engine.explain import explain
from echo_sgl.engine.requests.tasks import is_offline
from echo_sgl.engine.server_facts import server_facts
from echo_sgl.engine.settings import active_config
from echo_sgl.engine.steps.step_log import COLUMNS
from echo_sgl.policies.limits.step_limit import StepLimit
from echo_sgl.policies.limits.step_limits import BudgetLimit

if TYPE_CHECKING:
    from echo_sgl.engine.scheduler import EchoScheduler

STEPS_QUESTION = "echo-sgl-steps"
REQUEST_QUESTION = "echo-sgl-request:"
TRACE_QUESTION = "echo-sgl-trace:"
RECORDING_QUESTION = "echo-sgl-recording:"
BUDGET_KEY = "echo_sgl_budget_s"
FORGET_TRAFFIC_KEY = "echo_sgl_forget_traffic"
MAX_BUDGET_S = 3600.0


def answer_question(
    scheduler: EchoScheduler, question: str | None
) -> GetInternalStateReqOutput | None:
    """The answer to a question of ours, None for SGLang's own."""
    question = question or ""
    if question == STEPS_QUESTION:
        state = steps_state(scheduler)
    elif question.startswith(REQUEST_QUESTION):
        state = {"request": explain(scheduler, question.removeprefix(REQUEST_QUESTION))}
    elif question.startswith(TRACE_QUESTION):
        state = trace_state(scheduler, float(question.removeprefix(TRACE_QUESTION)))
    elif question.startswith(RECORDING_QUESTION):
        state = recording_state(scheduler, question.removeprefix(RECORDING_QUESTION))
    else:
        return None
    return GetInternalStateReqOutput(internal_state={"replica": _replica(), **state})


def steps_state(scheduler: EchoScheduler) -> dict[str, Any]:
    """What it runs on and by which config, columns, then one row per step, oldest first."""
    timer = scheduler.step_timer
    return {
        "server": server_facts(scheduler),
        "config": dataclasses.asdict(active_config()),
        "num_running": sum(1 for _ in scheduler.running_reqs()),
        "num_waiting": len(scheduler.waiting_queue) + len(scheduler.offline_pool),
        "num_offline": len(scheduler.offline_pool) + sum(map(is_offline, scheduler.running_reqs())),
        "num_started": scheduler.step_control.counts.num_started,
        "columns": [*BatchRow._fields, "time_s"],
        "rows": [[*row, time_s] for row, time_s in timer.records()],
        "num_steps": timer.num_steps,
    }


def trace_state(scheduler: EchoScheduler, seconds: float) -> dict[str, Any]:
    """The steps planned in the last seconds, with what was planned and what came of it."""
    now_s = scheduler.echo_clock.now_s
    scheduler.step_timer.collect()
    notes = scheduler.step_control.log.since(now_s - seconds)
    return {"now_s": now_s, "columns": list(COLUMNS), "rows": [note.as_row() for note in notes]}


def recording_state(scheduler: EchoScheduler, question: str) -> dict[str, Any]:
    """Requests that ended; `question`: the recording's id, "/", where each replica goes on."""
    recording, _, after = question.partition("/")
    numbers = dict(part.split(":") for part in after.split(",") if part)
    number = numbers.get(str(_replica()))
    now_s = scheduler.echo_clock.now_s
    return scheduler.recording.since(recording, None if number is None else int(number), now_s)


def budget_problem(limit: str, budget_s: object) -> str | None:
    """Why steps cannot have this budget while `limit` is their limit, or None."""
    if limit != "budget":
        return (
            f'steps.limit is {limit!r}; only steps.limit = "budget" has a budget. '
            "Start the server with a config that names it, --config hygen for example"
        )
    is_number = isinstance(budget_s, int | float) and not isinstance(budget_s, bool)
    if is_number and 0 < cast(float, budget_s) <= MAX_BUDGET_S:
        return None
    return (
        f"budget_s is {repr(budget_s)[:100]}; allowed are seconds above 0 and up to "
        f'{MAX_BUDGET_S:g}, as in {{"budget_s": 0.05}}'
    )


def obey(
    scheduler: EchoScheduler, server_args: dict[str, int | float]
) -> SetInternalStateReqOutput | None:
    """Do what our routes ask for; None for settings of SGLang's own."""
    if FORGET_TRAFFIC_KEY in server_args:
        scheduler.kv_limits.forget_demand()
        scheduler.step_control.planner.forget_traffic()
        return SetInternalStateReqOutput(updated=True)
    scheduler.step_control.planner.held.end()
    return set_budget(scheduler.step_control.planner.limit, server_args)


def set_budget(
    limit: StepLimit, server_args: dict[str, int | float]
) -> SetInternalStateReqOutput | None:
    """Set the budget if that is what is asked for; None for settings of SGLang's own."""
    if BUDGET_KEY not in server_args:
        return None
    budget_s = server_args[BUDGET_KEY]
    if not isinstance(limit, BudgetLimit) or budget_problem("budget", budget_s):
        return SetInternalStateReqOutput(updated=False)
    limit.set_budget(float(budget_s))
    return SetInternalStateReqOutput(updated=True)


def _replica() -> int:
    return get_parallel().dp_rank or 0
