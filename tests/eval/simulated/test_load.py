"""The loads of simulated evaluations: jobs that outlast the online requests they run beside."""

from __future__ import annotations

import pytest

from echo_sgl.types import Task
from eval.load.records import Status
from eval.simulated.load import LEAD_S, Load, Pattern, unpromised_echo

DURATION_S = 20.0


@pytest.fixture(scope="module")
def load() -> Load:
    """llm-d's own jobs, which a server without online requests is soon through with."""
    return Load(0.3, Pattern("llm-d"), duration_s=DURATION_S)


def test_a_job_that_would_run_dry_comes_again(load: Load) -> None:
    num_lines = len(load._line_ids)
    assert len(load.offline) > num_lines and len(load.offline) % num_lines == 0
    assert len({one.id for one in load.offline}) == len(load.offline)
    beside = load.run(unpromised_echo(), [*load.online, *load.offline])
    job = [one for one in beside if one.task is Task.OFFLINE]
    done = [one for one in job if one.status is Status.OK and one.end_s < LEAD_S + DURATION_S]
    assert num_lines < len(done) < len(job)


def test_a_copy_asks_for_as_much_and_shares_nothing(load: Load) -> None:
    line, copy, other = (load._copies(3)[number * len(load._line_ids)] for number in range(3))
    prompts = [list(load._prompts.ids(one)) for one in (line, copy, other)]
    assert len({ids[0] for ids in prompts}) == 3
    assert len({tuple(ids[1:]) for ids in prompts}) == 1
    answers = {load._prompts.answer_tokens(one) for one in (line, copy, other)}
    assert len(answers) == 1
