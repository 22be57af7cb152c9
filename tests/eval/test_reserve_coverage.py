"""The evaluation of the reserve: its service model, its figures, and what real traces say."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_sgl.estimators.kv_demand import KvDemandPredictor
from eval import reserve_coverage
from eval.reserve_coverage import (
    TRACES,
    ServiceModel,
    coverage_row,
    evaluate,
    main,
    online_use,
    predictions,
)
from eval.workloads import DATA_DIR, WorkloadError
from eval.workloads.traces import Arrival

SLOW = ServiceModel(prefill_tokens_per_s=100.0, tpot_s=0.5)


class Says(KvDemandPredictor):
    """Predicts the same always, from a given second on."""

    def __init__(self, tokens: float, from_s: float = 0.0) -> None:
        super().__init__(window_s=1.0, bucket_s=1.0)
        self.tokens, self.from_s = tokens, from_s

    def predict_peak(self, now_s: float) -> float | None:
        return self.tokens if now_s >= self.from_s else None

    def _forecast(self, bucket: object) -> float | None:
        return None


def write(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    return path


def row(timestamp: object = 0, input_length: object = 5, output_length: object = 3) -> str:
    return json.dumps(
        {"timestamp": timestamp, "input_length": input_length, "output_length": output_length}
    )


def test_a_request_holds_its_prompt_then_each_token_until_its_last():
    use = online_use([Arrival(0.0, 200, 4), Arrival(9.0, 1, 0)], SLOW)
    # 2 s of prefill, then two tokens a second; all is freed at 4 s.
    assert use.tolist() == [200, 200, 200, 202, 0, 0, 0, 0, 0, 1]


def test_requests_add_up():
    one, other = Arrival(0.5, 300, 10), Arrival(2.0, 100, 6)
    last = Arrival(30.0, 1, 1)
    alone = [online_use([request, last], SLOW) for request in (one, other)]
    both = online_use([one, other, last], SLOW)
    # The last request, which only sets the length, is in both.
    assert both[:30].tolist() == (alone[0] + alone[1])[:30].tolist()


@given(
    st.lists(
        st.tuples(st.floats(0, 50), st.integers(0, 500), st.integers(0, 50)),
        min_size=1,
        max_size=20,
    )
)
@settings(max_examples=50)
def test_use_is_never_negative_nor_above_all_that_ever_came(requests):
    arrivals = [Arrival(*request) for request in sorted(requests)]
    use = online_use(arrivals, SLOW)
    assert (use >= 0).all()
    assert use.max() <= sum(one.prompt_tokens + one.output_tokens for one in arrivals)


def test_a_prediction_that_is_never_exceeded_covers_all_and_its_excess_is_counted():
    use = np.full(500, 100.0)
    figures = coverage_row(use, Says(150.0), horizon_s=300)
    assert figures["instants"] == 500 - 300 - 60
    assert figures["coverage"] == figures["instant_coverage"] == 1.0
    assert figures["over_reservation"] == pytest.approx(0.5)
    assert figures["mean_reserve"] == pytest.approx(0.5)


def test_a_peak_anywhere_in_the_horizon_must_be_covered():
    use = np.full(500, 100.0)
    use[300] = 200.0
    figures = coverage_row(use, Says(150.0), horizon_s=100)
    # 340 instants from 60 s on; the spike is in the horizon of 200..299.
    assert figures["coverage"] == pytest.approx(1 - 100 / 340)
    assert figures["instant_coverage"] == pytest.approx(1 - 1 / 340)


def test_an_instant_without_a_prediction_is_not_covered_and_reserves_nothing():
    figures = coverage_row(np.full(460, 100.0), Says(150.0, from_s=110.0), horizon_s=300)
    assert figures["coverage"] == pytest.approx(0.5)
    assert figures["mean_reserve"] == pytest.approx(0.25)


def test_a_prediction_is_made_with_what_was_seen_so_far_only():
    use = np.arange(400.0)
    seen_all = predictions(use, reserve_coverage.create_kv_demand(reserve_coverage.CONFIGS["peak"]))
    seen_half = predictions(
        use[:200], reserve_coverage.create_kv_demand(reserve_coverage.CONFIGS["peak"])
    )
    assert np.array_equal(seen_all[:200], seen_half, equal_nan=True)


def test_a_trace_without_a_full_horizon_is_refused():
    with pytest.raises(WorkloadError, match="longer than 360 s"):
        coverage_row(np.ones(360), Says(1.0), horizon_s=300)


def test_a_run_leaves_config_figures_and_a_readable_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reserve_coverage, "RESULTS_DIR", tmp_path)
    trace = tmp_path / "made.jsonl.gz"
    lines = "\n".join(row(1000 * second, 400 + second % 90, 50) for second in range(500))
    trace.write_bytes(gzip.compress(lines.encode()))
    main(["--trace", str(trace), "--name", "tried", "--tpot-ms", "50"])
    config = json.loads((tmp_path / "tried" / "config.json").read_bytes())
    rows = json.loads((tmp_path / "tried" / "summary.json").read_bytes())["rows"]
    assert config["service_model"]["tpot_s"] == 0.05
    assert [(one["trace"], one["predictor"]) for one in rows] == [
        ("made", "peak"),
        ("made", "mean-std"),
    ]
    assert "| made | peak | 140 |" in (tmp_path / "tried" / "summary.md").read_text()
    assert "mean-std" in capsys.readouterr().out
    curves = json.loads((tmp_path / "tried" / "curves.json").read_bytes())["made"]
    assert {len(values) for values in curves.values()} == {500 // config["curve_step_s"]}
    judged = [
        (coming, predicted)
        for coming, predicted in zip(curves["coming peak"], curves["peak predicted"], strict=True)
        if None not in (coming, predicted)
    ]
    assert 5 <= len(judged) <= 10  # the last 300 s have no whole horizon ahead
    assert curves["coming peak"][-1] is None and curves["use"][-1] > 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--name", "../up"], "does not name one folder"),
        (["--tpot-ms", "0"], "not a number above 0"),
    ],
)
def test_a_bad_option_is_refused_by_name(args, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(args)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_a_missing_trace_ends_with_a_sentence():
    with pytest.raises(SystemExit, match=r"error: there is no file nowhere\.csv"):
        main(["--trace", "nowhere.csv"])


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("tpot_s", [0.01, 0.03, 0.1])
def test_the_peak_is_covered_on_real_traces_from_the_first_minute_on(trace, tpot_s):
    if not (DATA_DIR / trace).is_file():
        pytest.skip("the real workloads are not there")
    by_name = {one["predictor"]: one for one in evaluate([trace], ServiceModel(tpot_s=tpot_s))}
    assert by_name["peak"]["coverage"] >= 0.95
    assert by_name["peak"]["over_reservation"] <= 1.0
    assert by_name["mean-std"]["coverage"] < by_name["peak"]["coverage"]
