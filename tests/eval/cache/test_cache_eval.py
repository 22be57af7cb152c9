"""The cache experiments: options, arms, loads, figures and reports by hand, one run for real."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gzip
from pathlib import Path

import httpx
import orjson
import pytest

from echo_sgl.config import load_config
from echo_sgl.types import Task, task_of_service_tier
from eval.cache.arms import CACHE_ARMS, parse_settings, to_toml, with_config_file, with_settings
from eval.cache.load import CacheLoad, build_load, pool_size
from eval.cache.options import EXPERIMENTS, default_options, parse_options
from eval.cache.phases import PHASES, TalkPhase, _end_with
from eval.cache.run import run, server_args
from eval.load.client import Request, make_request
from eval.load.records import Record, read_records
from eval.workloads import WorkloadError
from eval.workloads.jobs import batch_line
from eval.workloads.prompts import Tokenizer, load_tokenizer
from eval.workloads.sessions import Session, Turn


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return load_tokenizer(str(tiny_model))


@pytest.fixture
def text_set(tmp_path: Path) -> str:
    """Three documents with four questions each."""
    documents = ["def one(): return 1\n" * 12, "class Two: pass\n" * 12, "import three\n" * 12]
    prefixes = [{"prefix_id": str(n), "prefix": text} for n, text in enumerate(documents)]
    requests = [
        {"id": f"{n}/{q}", "prefix_id": str(n), "suffix": f"# why {q}?", "out_tokens": 3}
        for n in range(3)
        for q in range(4)
    ]
    for kind, rows in (("prefixes", prefixes), ("requests", requests)):
        data = b"".join(orjson.dumps(row) + b"\n" for row in rows)
        (tmp_path / f"set.{kind}.jsonl.gz").write_bytes(gzip.compress(data))
    return str(tmp_path / "set")


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_needs_no_more_than_its_name(experiment: str) -> None:
    options = parse_options([experiment], prog="cache")
    assert options == default_options(experiment)
    assert options.job_names and options.picked_arms()
    assert set(PHASES) == set(EXPERIMENTS)


def test_every_option_can_be_given_on_the_command_line() -> None:
    defaults = dataclasses.asdict(default_options("burst"))
    experiment = defaults.pop("experiment")
    argv = [f"--{name.replace('_', '-')}={value}" for name, value in defaults.items()]
    assert parse_options([experiment, *argv], prog="cache") == default_options("burst")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "required: EXPERIMENT"),
        (["swap"], "invalid choice: 'swap'"),
        (["offline", "--arms", "stock"], "unknown arm 'stock'; known are stock-fcfs"),
        (["offline", "--arms", "psm,psm"], "arm 'psm' is named twice"),
        (["offline", "--size", "huge"], "--size is 'huge'; allowed are tiny"),
        (["offline", "--window", "0"], "--window is 0; it must be 1 or more"),
        (["offline", "--name", "../x"], "--name is '../x'"),
        (["offline", "--settings", "order=lru"], "'order=lru' is not of the form"),
        (["offline", "--settings", "cache.protected_share=2"], "allowed is 0.0 to 1.0"),
        (["offline", "--settings", "cache.nothing=2"], "unknown key 'nothing'"),
        (["offline", "--requests", "-1"], "--requests is -1"),
    ],
)
def test_a_wrong_option_ends_with_code_2_and_says_what_is_allowed(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(argv, prog="cache")
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_results_of_each_job_go_to_a_folder_of_their_own() -> None:
    options = default_options("control")
    assert [options.folder_name(job) for job in options.job_names] == [
        "cache-control-bbh",
        "cache-control-mmlu",
    ]
    named = default_options("offline", name="x", jobs="some/where/set")
    assert named.folder_name(named.job_names[0]) == "x-set"


def test_echos_arms_differ_from_each_other_by_their_config_only(tmp_path: Path) -> None:
    configs = {}
    for name, arm in CACHE_ARMS.items():
        written = with_config_file(arm, tmp_path / f"{name}.toml")
        if name.startswith("stock"):
            assert written == arm and not arm.offline_fields
            continue
        assert not arm.args and not arm.online_fields
        assert task_of_service_tier(arm.offline_fields["service_tier"]) is Task.OFFLINE
        configs[name] = load_config(str(written.config))
    # Without a reserve it is the default config, whose order of eviction is next-use.
    assert configs.pop("reserve-off") == configs["psm-next-use"]
    assert len({str(config) for config in configs.values()}) == len(configs)
    assert {config.offline.order for config in configs.values()} == {"psm"}
    orders = {name: configs[name].cache.order for name in configs if name.startswith("psm")}
    assert orders == {"psm": "stock", "psm-lru": "lru", "psm-echo": "echo",
                      "psm-next-use": "next-use"}  # fmt: skip
    predictors = {name: config.reserve.predictor for name, config in configs.items()}
    assert predictors.pop("reserve-peak") == "peak"
    assert predictors.pop("reserve-mean-std") == "mean-std"
    assert set(predictors.values()) == {"off"}


def test_settings_change_every_echo_arm_and_no_stock_one() -> None:
    changes = parse_settings(["cache.protected_share=0.25", "cache.order=lru", "reserve.k = 3"])
    assert changes == {"cache": {"protected_share": 0.25, "order": "lru"}, "reserve": {"k": 3}}
    changed = with_settings(CACHE_ARMS["psm"], changes)
    assert changed.settings["cache"] == {"order": "lru", "protected_share": 0.25}
    assert changed.settings["reserve"] == {"predictor": "off", "k": 3}
    assert with_settings(CACHE_ARMS["stock-fcfs"], changes) == CACHE_ARMS["stock-fcfs"]


def test_sections_are_written_as_toml() -> None:
    text = to_toml({"a": {"word": 'x"y', "number": 0.5}, "b": {"flag": True}})
    assert text == '[a]\nword = "x\\"y"\nnumber = 0.5\n\n[b]\nflag = true\n'


def test_sglang_takes_every_arms_arguments() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    for arm in CACHE_ARMS.values():
        args = server_args(default_options("offline"), arm, 1234)
        _, unknown = parser.parse_known_args(["--model-path", "m", *args])
        assert unknown == [] and args[args.index("--max-total-tokens") + 1] == "1234"


def test_the_pool_is_a_share_of_the_working_set_but_holds_two_requests() -> None:
    prompts = [[n // 2] * 10 + [n] for n in range(20)]  # ten pairs that share ten tokens
    small = default_options("offline", pool_share=0.5)
    assert pool_size(small, prompts, 11) == (50, "0.5 of the prefix working set of 100 tokens")
    tokens, note = pool_size(small, prompts, 30)
    assert tokens == 60 and "would be 50; 2 longest requests need 60" in note
    assert pool_size(default_options("offline", pool_tokens=77), prompts, 30) == (77, "given")
    with pytest.raises(WorkloadError, match="--pool-tokens is 59; the longest request needs 30"):
        pool_size(default_options("offline", pool_tokens=59), prompts, 30)


def test_steady_times_and_bursts_take_turns() -> None:
    options = default_options("burst", bursts=2, rate_rps=2, steady_s=5, burst_s=3, after_s=4)
    assert options.burst_segments == [(2, 5), (8, 3), (2, 5), (8, 3), (2, 4)]


def test_the_load_is_counted_in_the_tokens_that_the_server_sees(
    text_set: str, tokenizer: Tokenizer
) -> None:
    options = default_options("offline", document_tokens=40, max_answer_tokens=2, requests=10)
    load = build_load(options, text_set, tokenizer)
    assert len(load.job) == 10 and load.answer_tokens == 2
    assert [line["custom_id"] for line in load.job] == list(load.prompts)
    for line in load.job:
        assert load.prompts[line["custom_id"]] == tokenizer.encode(line["body"]["prompt"])
    bounds = load.bounds()
    assert 0 < bounds["belady, file order"] <= bounds["belady, prefix order"]
    assert bounds["belady, prefix order"] == bounds["infinite"]
    # Three documents fit twice over, a fifth of them does not hold two requests.
    assert load.facts()["prefix_working_set_tokens"] >= 120
    assert "2 longest requests need" in load.pool_note


def load_of(sessions: list[Session]) -> CacheLoad:
    job = [batch_line("a", {"prompt": "x", "max_tokens": 1})]
    return CacheLoad(job, {"a": [1]}, 1, 100, "given", sessions)


def test_every_turn_becomes_a_streamed_online_request_after_its_wait() -> None:
    load = load_of([Session("s", (Turn("p", 3, 0.5), Turn("p q", 4, 0.7)))])
    [talk] = load.talks(CACHE_ARMS["psm"])
    assert [(wait_s, request.id) for wait_s, request in talk] == [(0.5, "s/0"), (0.7, "s/1")]
    body = orjson.loads(talk[1][1].content)
    assert (body["prompt"], body["max_tokens"], body["stream"]) == ("p q", 4, True)
    assert "service_tier" not in body
    assert orjson.loads(load.lines(CACHE_ARMS["psm"])[0].content)["service_tier"] == "flex"
    assert "service_tier" not in orjson.loads(load.lines(CACHE_ARMS["stock-lpm"])[0].content)


class LoggedPhase(TalkPhase):
    """Notes what would have been sent."""

    def __init__(self) -> None:
        super().__init__("http://unused")
        self.log: list[str] = []

    async def _send(self, client: httpx.AsyncClient, request: Request, record: Record) -> None:
        self.log.append(f"+{request.id}")
        await asyncio.sleep(0)
        self.log.append(f"-{request.id}")


def talk(name: str, num_turns: int) -> list[tuple[float, Request]]:
    names = [f"{name}{number}" for number in range(num_turns)]
    return [(0.0, make_request(one, Task.ONLINE, "/", {})) for one in names]


def test_a_turn_waits_for_the_answer_before_it_and_talks_for_their_turn() -> None:
    phase = LoggedPhase()
    asyncio.run(phase.converse([talk("a", 2), talk("b", 1)], at_once=1))
    assert phase.log == ["+a0", "-a0", "+a1", "-a1", "+b0", "-b0"]
    assert [record.id for record in phase.records] == ["a0", "a1", "b0"]


def test_talks_are_held_at_the_same_time() -> None:
    phase = LoggedPhase()
    asyncio.run(phase.converse([talk("a", 1), talk("b", 1), talk("c", 1)], at_once=2))
    assert phase.log[:2] == ["+a0", "+b0"]
    assert phase.log.index("+c0") > phase.log.index("-a0")


def test_a_phase_ends_with_the_first_that_is_through() -> None:
    log: list[str] = []

    async def work(name: str, wait_s: float) -> None:
        try:
            await asyncio.sleep(wait_s)
        finally:
            log.append(name)

    asyncio.run(_end_with([work("short", 0.0), work("long", 60)], [work("beside", 0)], limit_s=60))
    assert log == ["short", "beside", "long"]
    log.clear()
    asyncio.run(_end_with([work("ender", 60)], limit_s=0.0))
    assert log == ["ender"]


def test_a_client_that_breaks_is_not_hidden() -> None:
    async def broken() -> None:
        raise RuntimeError("broken client")

    with pytest.raises(RuntimeError, match="broken client"):
        asyncio.run(_end_with([asyncio.sleep(0.01)], [broken()], limit_s=60))


@pytest.mark.server
@pytest.mark.slow
def test_a_small_job_runs_through_on_two_real_servers(
    text_set: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    options = default_options("offline", arms="stock-fcfs,psm", max_answer_tokens=2)
    folder = run(options, text_set, command="c", results_dir=tmp_path)
    load = build_load(options, text_set, tokenizer)
    tree = orjson.loads((folder / "summary.json").read_bytes())["repetitions"]
    for name in ("stock-fcfs", "psm"):
        records = read_records(folder / "raw" / f"{name}-1-offline-alone.jsonl.gz")
        lengths = {record.id: record.prompt_tokens for record in records}
        assert lengths == {key: len(tokens) for key, tokens in load.prompts.items()}
        [figures] = tree[name]
        assert figures["ok"] == 12 and 0 < figures["of_infinite"] <= 1
        counters = orjson.loads((folder / "raw" / f"{name}-1-counters.json").read_bytes())
        assert any(key.startswith("sglang:") for key in counters["offline-alone"])
    assert load_config(folder / "configs" / "psm.toml").cache.order == "stock"
    assert "- target: at least 97%" in (folder / "summary.md").read_text()
