"""What `echo-sgl explain` says of the server's answers."""

from __future__ import annotations

from typing import Any

import pytest

from echo_sgl.cli.watching.explain import sentences
from echo_sgl.engine.requests.refusals import Reason

POOLED = {
    "class": "offline",
    "age_s": 3.25,
    "state": "pooled",
    "position": "offered",
    "num_pooled": 1200,
    "ttft_s": None,
    "tpot_s": None,
    "deadline_in_s": None,
    "prompt_tokens": 512,
    "generated_tokens": 0,
    "max_new_tokens": 64,
}
LIMIT = {
    "reason": "limit",
    "limit_s": 0.012,
    "slack_s": -0.003,
    "room_s": 0.002,
    "smallest_chunk_s": 0.0141,
}
AHEAD = {**LIMIT, "room_s": 0.08}
REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "limit": (LIMIT, "limit): a step may take 12.0 ms, of which 2.0 ms are left for prefill"),
    "ahead of due times": (AHEAD, "limit): a step may take 12.0 ms, one that only prefills 80.0"),
    "memory": (
        {
            "needed_tokens": 900,
            "free_tokens": 1000,
            "evictable_tokens": 4000,
            "promised_tokens": 4700,
        },
        "needs 900 tokens of KV cache; 1,000 are free and 4,000 could be evicted, of which 4,700",
    ),
    "reserve": (
        {"needed_tokens": 2500, "used_tokens": 0, "planned_tokens": 0, "limit_tokens": 2000},
        "needs 2,500 tokens of KV cache; offline requests hold 0 and are promised 0 more, of the "
        "2,000",
    ),
    "adapter": ({"num_adapters": 2}, "requests with 2 others run or sit out, and no more fit"),
    "slot": ({"num_running": 4, "most": 4}, "4 requests run, 4 may (offline.max_running_requests)"),
    "gather": ({"num_places": 3, "empty_steps": 9}, "there is room for 3, and all that decode"),
    "queue": ({"num_places": 2, "empty_steps": 5}, "stop for them (steps.gather_online)"),
    "step": ({"first_due_in_s": 0.02}, "make a first token late that was due in 20.0 ms (steps.sp"),
    "gate": ({"lost_share": 0.25, "expected_tokens": 12.6}, "25% of the starts lost their memory"),
    "unfinished": ({"num_parked": 3}, "for 3 that started before it and sit out"),
    "ahead": ({"gave_place_for_s": 2.0, "due_in_s": 3.0}, "late 2.0 s ago. Its next token is due"),
    "late": ({"late_s": 2.0, "wait_s": 30.0}, "due 2.0 s ago, and 30.0 s after that it is put off"),
    "prefix": ({}, "which a neighbour computes right now"),
    "paused": ({}, "it is paused"),
    "order": ({}, "the prefill that is under way"),
}


def said(**changes: Any) -> str:
    return " ".join(sentences({**POOLED, **changes}))


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_is_a_sentence_with_its_numbers(reason: str) -> None:
    facts, expected = REASONS[reason]
    text = said(held_back={"reason": reason, **facts})
    assert expected in text
    assert text.startswith("Offline request, here for 3.2 s. It is among those that each step")


def test_every_reason_that_a_server_gives_is_known_here() -> None:
    assert set(Reason) <= REASONS.keys()


def test_who_is_behind_others_is_told_what_the_first_waits_for() -> None:
    behind = {"reason": "order", "num_before": 256, "is_exact": False, "first": LIMIT}
    text = said(held_back=behind)
    assert "at least 256 are before it. The first waits for time" in text
    assert "due in -3.0 ms; the smallest chunk of it is predicted to take 14.1 ms." in text


def test_who_is_held_back_by_nothing_is_told_so() -> None:
    assert "the next step may take it" in said(held_back=None)


def test_a_parked_request_has_its_decode_and_time_told() -> None:
    facts = {
        "limit_s": 0.01,
        "slack_s": None,
        "places_taken": 0.7,
        "places_ahead": 0.9,
        "with_decode_s": 0.02,
        "parked_for_s": 1.5,
    }
    text = said(state="parked", held_back={"reason": "limit", **facts}, generated_tokens=7)
    assert "sits out with its KV cache kept: 7 of at most 64" in text
    assert "online requests ask for 70% of the places, 90% if as many go on coming" in text
    facts["places_ahead"] = 0.7
    text = said(state="parked", held_back={"reason": "limit", **facts}, generated_tokens=7)
    assert "online requests ask for 70% of the places; with its decode" in text
    assert "with its decode the step is predicted to take 20.0 ms. It has sat out for 1.5 s" in text


def test_progress_and_terms_of_a_request_that_runs() -> None:
    running = said(state="prefilling", prefilled_tokens=256, held_back=None, deadline_in_s=-2.0)
    assert "256 of 512 tokens" in running and "Its deadline was 2.0 s ago." in running
    decoding = said(**{"class": "online"}, state="decoding", ttft_s=1.0, tpot_s=0.05)
    assert "It was promised its first token within 1.0 s and each token after it" in decoding


def test_who_waits_for_a_longer_chunk_is_told_which() -> None:
    told = said(held_back={**LIMIT, "worth_chunk_s": 0.0182})
    assert "predicted to take 14.1 ms, one that is worth a step 18.2 ms: it waits while" in told
    between_chunks = said(
        state="prefilling", prefilled_tokens=256, held_back={**LIMIT, "worth_chunk_s": 0.0182}
    )
    assert "256 of 512 tokens" in between_chunks and "one that is worth a step" in between_chunks


def test_who_never_fits_beside_online_requests_is_told_what_lets_it() -> None:
    told = said(held_back={**LIMIT, "most_s": 0.0133})
    assert "predicted to take 14.1 ms. Whoever arrives waits for at most 13.3 ms" in told
    assert "steps.stall_share" in told and "while no online request is there" in told
    assert "Whoever arrives" not in said(held_back=LIMIT)


def test_a_prediction_that_does_not_exist_yet_is_called_unknown() -> None:
    facts = {**LIMIT, "smallest_chunk_s": None, "slack_s": None}
    assert "predicted to take an unknown time" in said(held_back=facts)
