"""Where the time of steps goes: by what was in them, and what passes between them."""

from __future__ import annotations

import httpx
import pytest

from echo_sgl.engine.steps.step_log import DEFAULT_CAPACITY
from echo_sgl.types import MAX_TRACE_S
from eval.figures.step_shares import KINDS, kind_of, room, step_rows, step_shares
from eval.servers.server import Server


def step(start_s: float, time_s: float | None, **fields: float | None) -> dict[str, object]:
    own = {"num_prefills": 0, "prefill_tokens": 0, "num_decodes": 0, "num_offline": 0, "own_s": 0.0}
    return {**own, "start_s": start_s, "time_s": time_s, **fields}


def test_steps_are_told_apart_by_what_is_in_them() -> None:
    assert kind_of(step(0, 1, num_prefills=2)) == "online_prefill"
    assert kind_of(step(0, 1, num_prefills=2, num_offline=1)) == "offline_prefill"
    assert kind_of(step(0, 1, num_decodes=2)) == "online_decode"
    assert kind_of(step(0, 1, num_decodes=2, num_offline=1)) == "shared_decode"
    assert kind_of(step(0, 1, num_decodes=2, num_offline=2)) == "offline_decode"


def test_shares_add_up_to_the_whole_time() -> None:
    rows = [
        step(0.0, 1.0, num_decodes=3, num_offline=2, own_s=0.1),
        step(2.0, 3.0, num_prefills=1, num_offline=1, prefill_tokens=400, own_s=0.2),
        step(5.0, 2.5, num_decodes=1),  # planned ahead: it lasts beyond the next one's start
        step(7.0, None, num_decodes=1),  # not measured: what it took counts as between
        step(10.0, 9.0, num_decodes=4, num_offline=4),
    ]
    shares = step_shares(rows)
    assert shares["shared_decode"] == pytest.approx(0.1)
    assert shares["offline_prefill"] == pytest.approx(0.3)
    assert shares["online_decode"] == pytest.approx(0.25)
    assert shares["offline_decode"] == 0.0
    assert sum(shares[kind] or 0.0 for kind in KINDS) == pytest.approx(1.0)
    assert shares["planning"] == pytest.approx(0.03)
    assert (shares["prefill_tokens"], shares["offline_decodes"]) == (400, 2)


def test_a_server_that_tells_nothing_has_the_same_keys() -> None:
    assert set(step_shares([])) == set(step_shares([step(0, 1), step(1, 1)]))
    assert not any(step_shares([]).values())


def test_online_work_leaves_what_its_prefills_and_its_part_of_full_decodes_do_not_take() -> None:
    rows = [
        step(0.0, 2.0, num_prefills=1, prefill_tokens=100),
        step(2.0, 1.0, num_prefills=1, num_offline=1, prefill_tokens=50),
        step(3.0, 4.0, num_decodes=8, num_offline=6),  # 0.5 s for each of them
        step(7.0, 3.0, num_decodes=1),  # alone it takes 3 s, in full steps it would take 0.5
    ]
    assert room(rows) == pytest.approx(1.0 - (2.0 + 3 * 0.5) / 10.0)


def test_without_online_work_all_of_the_time_is_room() -> None:
    rows = [step(0.0, 2.0, num_decodes=4, num_offline=4)]
    assert room(rows) == 1.0
    assert room([step(0.0, 1.0, num_prefills=1)]) is None


@pytest.mark.parametrize(
    ("num_steps", "seconds", "num_told"),
    [(3, 10.0, 3), (DEFAULT_CAPACITY, 10.0, 0), (3, MAX_TRACE_S + 1, 0)],
)
def test_a_part_of_the_steps_is_not_taken_for_all_of_them(
    num_steps: int, seconds: float, num_told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [[float(number)] for number in range(num_steps)]
    answer = {"replicas": [{"columns": ["start_s"], "rows": rows}]}
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=answer))
    monkeypatch.setattr("eval.figures.step_shares.LOCAL", httpx.Client(transport=transport))
    server = Server("http://server", None, None, None)  # type: ignore[arg-type]
    assert len(step_rows(server, seconds)) == num_told
