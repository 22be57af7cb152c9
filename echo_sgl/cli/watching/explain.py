"""`echo-sgl explain`: what a request is doing, or waiting for, in sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any
from urllib.parse import quote

import typer

Facts = Mapping[str, Any]
_NEEDED = ("class", "age_s", "state", "ttft_s", "tpot_s", "deadline_in_s")


def explain(
    id: Annotated[str, typer.Argument(help="The `rid` in the request's body.")],
    url: Annotated[str, typer.Option(help="Where the server listens.")] = "http://127.0.0.1:30000",
    as_json: Annotated[bool, typer.Option("--json", help="Print the server's answer.")] = False,
    api_key: Annotated[
        str | None,
        typer.Option(help="Sent as bearer token.", envvar=["ECHO_SGL_API_KEY", "OPENAI_API_KEY"]),
    ] = None,
) -> None:
    """Say what a request is doing, or what it is waiting for.

    Example:

        echo-sgl explain job-17 --url http://127.0.0.1:30000
    """
    import json

    from echo_sgl.cli.server_route import fetch
    from echo_sgl.cli.text import request_id
    from echo_sgl.cli.url import server_root

    path = f"/echo/requests/{quote(request_id(id), safe='')}"
    answer = fetch(server_root(url), path, api_key, needs=_NEEDED)
    typer.echo(json.dumps(answer) if as_json else "\n".join(sentences(answer)))


def sentences(answer: Facts) -> Iterator[str]:
    """The server's answer for people, a sentence a line."""
    yield f"{answer['class'].capitalize()} request, here for {_seconds(answer['age_s'])}."
    yield _STATES[answer["state"]](answer)
    if answer.get("held_back"):
        yield _waits_for(answer["held_back"], "It")
    elif answer["state"] in ("waiting", "pooled"):
        yield "Nothing is known to be in its way: the next step may take it."
    yield from _terms(answer)


def _pooled(answer: Facts) -> str:
    where = {
        "next": "It is the next of",
        "offered": "It is among those that each step looks at, of",
        "later": "It has its place further back among",
    }[answer["position"]]
    return f"{where} {answer['num_pooled']:,} offline requests that wait."


def _waiting(answer: Facts) -> str:
    if answer.get("position") == "grammar":
        return "It waits until the grammar of its answer is compiled."
    return "It waits for its prefill."


def _prefilling(answer: Facts) -> str:
    prompt_tokens = answer["prompt_tokens"] + answer["generated_tokens"]
    return f"It is being prefilled: {answer['prefilled_tokens']:,} of {prompt_tokens:,} tokens."


def _decoding(answer: Facts) -> str:
    return f"It decodes: {_progress(answer)}."


def _parked(answer: Facts) -> str:
    return f"It sits out with its KV cache kept: {_progress(answer)}."


_STATES: dict[str, Callable[[Facts], str]] = {
    "pooled": _pooled,
    "waiting": _waiting,
    "prefilling": _prefilling,
    "decoding": _decoding,
    "parked": _parked,
}


def _progress(answer: Facts) -> str:
    return f"{answer['generated_tokens']:,} of at most {answer['max_new_tokens']:,} tokens are done"


def _waits_for(reason: Facts, who: str) -> str:
    return f"{who} waits {_REASONS[reason['reason']](reason)}"


def _limit(facts: Facts) -> str:
    text = f"for time (limit): a step may take {_seconds(facts['limit_s'])}"
    limit_s, room_s = facts["limit_s"], facts.get("room_s")
    if room_s is not None and limit_s is not None and room_s > limit_s:
        text += f", one that only prefills {_seconds(room_s)}"
    elif room_s is not None and room_s != limit_s:
        text += f", of which {_seconds(room_s)} are left for prefill"
    if facts.get("slack_s") is not None:
        text += f", the next online token is due in {_seconds(facts['slack_s'])}"
    if facts.get("places_taken"):
        text += f", online requests ask for {facts['places_taken']:.0%} of the places"
        if facts.get("places_ahead", 0.0) > facts["places_taken"]:
            text += f", {facts['places_ahead']:.0%} if as many go on coming"
    if "with_decode_s" in facts:
        text += (
            f"; with its decode the step is predicted to take {_seconds(facts['with_decode_s'])}"
        )
        return f"{text}. It has sat out for {_seconds(facts['parked_for_s'])}."
    chunk_s = _seconds(facts["smallest_chunk_s"])
    text += f"; the smallest chunk of it is predicted to take {chunk_s}"
    if "most_s" in facts:
        return f"{text}. {_never(facts['most_s'])}"
    if "worth_chunk_s" not in facts:
        return f"{text}."
    worth_s = _seconds(facts["worth_chunk_s"])
    return f"{text}, one that is worth a step {worth_s}: it waits while the room for it grows."


def _never(most_s: float) -> str:
    return (
        f"Whoever arrives waits for at most {_seconds(most_s)}, so however much time there is, it "
        "goes on only while no online request is there. A longer TTFT, a larger steps.stall_share "
        "or max_stall_s, or a smaller min_chunk_tokens lets it go on beside them."
    )


def _memory(facts: Facts) -> str:
    return (
        f"for memory: it needs {facts['needed_tokens']:,} tokens of KV cache; "
        f"{facts['free_tokens']:,} are free and {facts['evictable_tokens']:,} could be evicted, of "
        f"which {facts['promised_tokens']:,.0f} are promised to running requests."
    )


def _reserve(facts: Facts) -> str:
    return (
        f"for the reserve: it needs {facts['needed_tokens']:,} tokens of KV cache; offline "
        f"requests hold {facts['used_tokens']:,} and are promised {facts['planned_tokens']:,} "
        f"more, of the {facts['limit_tokens']:,} that they may. "
        "The rest is kept for online requests ([reserve])."
    )


def _order(facts: Facts) -> str:
    if "num_before" not in facts:
        return "for the prefill that is under way: it has all that the step may prefill."
    least = "" if facts["is_exact"] else "at least "
    text = f"for its turn (order): {least}{facts['num_before']:,} are before it."
    return f"{text} {_waits_for(facts['first'], 'The first')}" if facts["first"] else text


def _slot(facts: Facts) -> str:
    most = f", {facts['most']:,} may (offline.max_running_requests)" if "most" in facts else ""
    return f"for a request slot: {facts['num_running']:,} requests run{most}."


def _adapter(facts: Facts) -> str:
    return (
        f"for its LoRA adapter: requests with {facts['num_adapters']:,} others run or sit out, and "
        "no more fit (--max-loras-per-batch)."
    )


def _prefix(facts: Facts) -> str:
    return "for its prefix, which a neighbour computes right now; a step later it is in the cache."


def _ahead(facts: Facts) -> str:
    return (
        "until its next token is due: it was ahead of what it was promised, and gave its place to "
        f"a request that would have been late {_seconds(facts['gave_place_for_s'])} ago. "
        f"Its next token is due in {_seconds(facts['due_in_s'])}."
    )


def _late(facts: Facts) -> str:
    return (
        f"until those have started that can be in time: its first token was due "
        f"{_seconds(facts['late_s'])} ago, and {_seconds(facts['wait_s'])} after that it is put "
        "off no longer (steps.late_wait_s)."
    )


def _step(facts: Facts) -> str:
    return (
        "for a prefill step of its own: in that of others it would make a first token late that "
        f"was due in {_seconds(facts['first_due_in_s'])} (steps.split_online)."
    )


def _gather(facts: Facts, setting: str = "steps.gather") -> str:
    return (
        f"for others to start with it in one prefill step: there is room for "
        f"{facts['num_places']:,}, and all that decode would stop for them ({setting})."
    )


def _gate(facts: Facts) -> str:
    return (
        f"until a start pays (steps.gate): {facts['lost_share']:.0%} of the starts lost their "
        f"memory to online requests, and an answer of {facts['expected_tokens']:.0f} tokens beside "
        "those that decode saves less than that share of its prompt costs."
    )


def _unfinished(facts: Facts) -> str:
    return (
        f"for {facts['num_parked']:,} that started before it and sit out: they go on first "
        "(steps.parked_share)."
    )


def _paused(facts: Facts) -> str:
    return "until generation goes on: it is paused."


_REASONS: dict[str, Callable[[Facts], str]] = {
    "limit": _limit,
    "memory": _memory,
    "reserve": _reserve,
    "order": _order,
    "slot": _slot,
    "adapter": _adapter,
    "prefix": _prefix,
    "ahead": _ahead,
    "late": _late,
    "step": _step,
    "gather": _gather,
    "queue": partial(_gather, setting="steps.gather_online"),
    "gate": _gate,
    "unfinished": _unfinished,
    "paused": _paused,
}


def _terms(answer: Facts) -> Iterator[str]:
    promises = [("first token", answer["ttft_s"]), ("token after it", answer["tpot_s"])]
    named = [f"{what} within {_seconds(time_s)}" for what, time_s in promises if time_s is not None]
    if named and answer["class"] == "online":
        yield f"It was promised its {' and each '.join(named)}."
    if (left_s := answer["deadline_in_s"]) is not None:
        late = f"was {_seconds(-left_s)} ago" if left_s < 0 else f"is in {_seconds(left_s)}"
        yield f"Its deadline {late}."


def _seconds(time_s: float | None) -> str:
    if time_s is None:
        return "an unknown time"
    return f"{time_s:.1f} s" if abs(time_s) >= 1 else f"{time_s * 1000:.1f} ms"
