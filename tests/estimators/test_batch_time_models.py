"""Each batch-time model against its paper's formula, worked out by hand."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from echo_sgl.batch_shape import BatchShape, StepKind, rows_of
from echo_sgl.estimators.batch_time import create_batch_time
from echo_sgl.estimators.held_out import held_out_errors
from echo_sgl.estimators.roofline_time import Transformer
from tests.estimators.steps import (
    SMALL_LLAMA,
    batches,
    measured,
    random_rows,
    shape_of,
    true_model,
    unfitted,
)


def predicted_s(name, batch, **coefficients):
    model = unfitted(name)
    zeros = dict.fromkeys(model.COEFFICIENTS, 0.0)
    return model.with_coefficients({**zeros, **coefficients}).predict_s(shape_of(batch))


# Pooled (Echo eq. 6-8)


def test_pooled_prices_one_uncached_prefill_as_echo_does():
    time_s = predicted_s(
        "pooled", [(300, 0)], prefill_area=2e-8, prefill_token_beyond=5e-5, prefill_step=3e-3
    )
    assert time_s == pytest.approx(2e-8 * 300**2 + 5e-5 * 300 + 3e-3)


@pytest.mark.parametrize(("tokens", "time_s"), [(10, 10.0), (100, 100.0), (130, 100.0 + 3 * 30)])
def test_pooled_prices_tokens_beyond_the_knee_of_the_whole_step_on_their_own(tokens, time_s):
    weights = {"prefill_token": 1.0, "prefill_token_beyond": 3.0, "prefill_knee": 100.0}
    batch = [(tokens // 2, 0), (tokens - tokens // 2, 0)]
    assert predicted_s("pooled", batch, **weights) == time_s


def test_pooled_prices_a_cached_prefix_that_few_tokens_wait_for():
    assert predicted_s("pooled", [(2, 500), (3, 40)], prefill_cached=0.5) == 0.5 * (500 + 40)


def test_pooled_prices_a_cached_prefix_by_the_area_it_adds():
    assert predicted_s("pooled", [(300, 500)], prefill_area=1.0) == 800**2 - 500**2


def test_pooled_prices_decodes_by_max_and_mean_at_one_batch_size():
    lengths = [100, 300, 500]
    time_s = predicted_s(
        "pooled", [(0, one) for one in lengths], decode_max_token=2.0, decode_token=0.5
    )
    assert time_s == pytest.approx(2.0 * max(lengths) + 0.5 * 3 * np.mean(lengths))


@pytest.mark.parametrize(("num_decodes", "time_s"), [(1, 800), (8, 800), (9, 900), (32, 3200)])
def test_pooled_prices_what_binds_where_contexts_are_attended_at_once(num_decodes, time_s):
    weights = {"decode_max_token": 8.0, "decode_token": 1.0, "decode_overlap": 1.0}
    assert predicted_s("pooled", [(0, 100)] * num_decodes, **weights) == time_s


def test_pooled_counts_half_of_the_smaller_cost_where_contexts_overlap_by_half():
    weights = {"decode_max_token": 2.0, "decode_token": 0.5, "decode_overlap": 0.5}
    assert predicted_s("pooled", [(0, 100), (0, 300)], **weights) == 600 + 0.5 * 200


@pytest.mark.parametrize(("num_prefills", "time_s"), [(1, 4008), (4, 4008), (5, 5000), (9, 9000)])
def test_pooled_prices_what_binds_where_prefixes_are_read_at_once(num_prefills, time_s):
    weights = {"prefill_max_token": 4.0, "prefill_cached": 1.0, "prefill_overlap": 1.0}
    assert predicted_s("pooled", [(2, 1000)] * num_prefills, **weights) == time_s


def test_pooled_mixes_between_the_larger_and_the_sum():
    batch, parts = [(10, 0), (0, 40)], {"prefill_token_beyond": 1.0, "decode_token": 1.0}
    assert predicted_s("pooled", batch, **parts) == 40
    assert predicted_s("pooled", batch, **parts, mixing=0.5) == 45
    assert predicted_s("pooled", batch, **parts, mixing=1.0) == 50


@given(batches)
def test_pooled_takes_at_least_its_larger_half_and_at_most_both(batch):
    model = true_model("pooled")
    prefill_s = model.predict_s(shape_of([one for one in batch if one[0]]))
    decode_s = model.predict_s(shape_of([one for one in batch if not one[0]]))
    time_s = model.predict_s(shape_of(batch))
    assert max(prefill_s, decode_s) <= time_s <= (prefill_s + decode_s) * (1 + 1e-12)


@pytest.mark.parametrize("mixing", [0.0, 0.4, 1.0])
def test_pooled_finds_the_mixing_coefficient(mixing):
    truth = true_model("pooled")
    truth = truth.with_coefficients({**truth.coefficients_, "mixing": mixing})
    rows = random_rows(900, seed=1)
    model = unfitted("pooled").fit(rows, measured(truth, rows, noise=0.02, seed=2))
    assert model.coefficients_["mixing"] == pytest.approx(mixing, abs=0.03)


def test_pooled_takes_the_whole_sum_where_no_mixed_step_was_measured():
    rows = random_rows(100, seed=3, kinds=(StepKind.PREFILL, StepKind.DECODE))
    model = unfitted("pooled").fit(rows, true_model("pooled").predict_rows_s(rows))
    assert model.coefficients_["mixing"] == 1.0


@pytest.mark.parametrize(("num_decodes", "time_s"), [(1, 5.0), (3, 15.0), (5, 15.0 + 2 * 2)])
def test_pooled_prices_decodes_beyond_the_knee_on_their_own(num_decodes, time_s):
    weights = {"decode_request": 5.0, "decode_request_beyond": 2.0, "decode_knee": 3.0}
    assert predicted_s("pooled", [(0, 10)] * num_decodes, **weights) == time_s


def test_pooled_finds_the_knees_and_the_cached_prefix():
    truth, rows = true_model("pooled"), random_rows(900, seed=6)
    found = unfitted("pooled").fit(rows, measured(truth, rows, noise=0.02, seed=7)).coefficients_
    for name in ("prefill_knee", "decode_knee"):
        assert found[name] == truth.coefficients_[name], name
    for name in (
        "prefill_token",
        "prefill_token_beyond",
        "prefill_cached",
        "decode_request",
        "decode_request_beyond",
    ):
        assert found[name] == pytest.approx(truth.coefficients_[name], rel=0.2), name


@pytest.mark.parametrize("kinds", [(StepKind.PREFILL, StepKind.DECODE), ()], ids=["pure", "all"])
@pytest.mark.parametrize("width", [2, 3])
def test_pooled_finds_that_contexts_are_attended_at_once(width, kinds):
    known = true_model("pooled").coefficients_ | {"decode_overlap": 1.0, "decode_token": 5e-6}
    truth = unfitted("pooled").with_coefficients(known | {"decode_max_token": 5e-6 * width})
    rows = random_rows(900, seed=6, kinds=kinds)
    model = unfitted("pooled").fit(rows, measured(truth, rows, noise=0.02, seed=7))
    assert model.coefficients_["decode_overlap"] == 1.0
    unseen = random_rows(600, seed=8, kinds=kinds)
    errors = held_out_errors(model, (unseen, truth.predict_rows_s(unseen)))
    assert max(one.mape for one in errors.values()) < 0.01


@pytest.mark.parametrize("rare", [StepKind.PREFILL, None])
def test_pooled_fits_mixed_steps_beside_decodes_that_overlap(rare):
    known = true_model("pooled").coefficients_ | {"decode_overlap": 1.0, "mixing": 1.0}
    known |= {"decode_max_token": 4e-5, "decode_token": 4e-6}
    truth = unfitted("pooled").with_coefficients(known)
    kinds = (StepKind.DECODE, StepKind.MIXED, *([] if rare else [StepKind.PREFILL]))
    rows = random_rows(900, seed=9, kinds=kinds)
    model = unfitted("pooled").fit(rows, measured(truth, rows, noise=0.01, seed=10))
    unseen = random_rows(600, seed=11, kinds=kinds)
    errors = held_out_errors(model, (unseen, truth.predict_rows_s(unseen)))
    assert max(one.mape for one in errors.values()) < 0.01


def test_pooled_takes_costs_to_add_up_where_a_search_cannot_be_solved(monkeypatch):
    known = true_model("pooled").coefficients_ | {"decode_overlap": 1.0, "decode_token": 5e-6}
    known |= {"decode_max_token": 1e-5}
    truth, rows = unfitted("pooled").with_coefficients(known), random_rows(900, seed=6)
    times_s = truth.predict_rows_s(rows)
    assert unfitted("pooled").fit(rows, times_s).coefficients_["decode_overlap"] == 1.0

    def unsolved(steps, binds):
        raise ValueError("these steps cannot be fitted")

    monkeypatch.setattr("echo_sgl.estimators.pooled_half._search_overlap", unsolved)
    assert unfitted("pooled").fit(rows, times_s).coefficients_["decode_overlap"] == 0.0


def test_pooled_takes_costs_to_add_up_where_steps_do_not_tell():
    """One request at a time: whether two would be attended to at once was never seen."""
    rows = rows_of(shape_of([(0, context)]) for context in range(100, 3000, 20))
    rows = np.concatenate([rows, random_rows(60, seed=1, kinds=(StepKind.PREFILL,))])
    rows = np.concatenate([rows, rows_of(shape_of([(0, 60)] * 2) for _ in range(3))])
    times_s = measured(true_model("pooled"), rows, noise=0.02, seed=2)
    assert unfitted("pooled").fit(rows, times_s).coefficients_["decode_overlap"] == 0.0


def test_pooled_finds_that_prefixes_are_read_at_once():
    known = true_model("pooled").coefficients_ | {"prefill_overlap": 1.0}
    known |= {"prefill_max_token": 2e-5, "prefill_cached": 8e-6}
    truth = unfitted("pooled").with_coefficients(known)
    rows = random_rows(900, seed=12)
    model = unfitted("pooled").fit(rows, measured(truth, rows, noise=0.02, seed=13))
    assert model.coefficients_["prefill_overlap"] == 1.0
    unseen = random_rows(600, seed=14)
    errors = held_out_errors(model, (unseen, truth.predict_rows_s(unseen)))
    assert max(one.mape for one in errors.values()) < 0.01


def test_pooled_takes_prefixes_to_add_up_where_one_request_at_a_time_prefilled():
    """Then nobody is early who was told as much as all of them would take one after the other."""
    rng = random.Random(3)
    rows = rows_of(
        shape_of([(int(2 ** rng.uniform(0, 8)), rng.randint(0, 3000))]) for _ in range(300)
    )
    rows = np.concatenate([rows, random_rows(60, seed=1, kinds=(StepKind.DECODE,))])
    known = true_model("pooled").coefficients_ | {"prefill_cached": 1e-5}
    truth = unfitted("pooled").with_coefficients(known)
    model = unfitted("pooled").fit(rows, measured(truth, rows, noise=0.02, seed=2))
    several = shape_of([(2, 2000)] * 4)
    assert model.coefficients_["prefill_overlap"] == 0.0
    assert model.predict_s(several) == pytest.approx(truth.predict_s(several), rel=0.05)


@pytest.mark.parametrize("knee", [128.0, 256.0, 512.0])
def test_pooled_finds_the_knee_of_batches_of_hundreds(knee):
    rng, shapes = random.Random(0), []
    for _ in range(200):
        shape = BatchShape()
        for _ in range(int(2 ** rng.uniform(0, 10.5))):
            shape.add_decode(rng.randint(1, 100))
        shapes.append(shape)
    known = true_model("pooled").coefficients_ | {"decode_knee": knee}
    truth = unfitted("pooled").with_coefficients(known)
    rows = np.concatenate([random_rows(60, seed=1, kinds=(StepKind.PREFILL,)), rows_of(shapes)])
    found = unfitted("pooled").fit(rows, measured(truth, rows, noise=0.01, seed=2)).coefficients_
    assert found["decode_knee"] == knee
    assert found["decode_request_beyond"] == pytest.approx(known["decode_request_beyond"], rel=0.2)


def test_pooled_has_no_knee_beyond_which_too_few_steps_went():
    decodes, truth = random_rows(50, seed=8, kinds=(StepKind.DECODE,)), true_model("pooled")
    prefills = random_rows(400, seed=9, kinds=(StepKind.PREFILL,))
    rows = np.concatenate([prefills[prefills[:, 1] < 60], decodes])
    model = unfitted("pooled").fit(rows, truth.predict_rows_s(rows))
    assert model.coefficients_["prefill_knee"] in (0.0, 32.0)
    # Beyond what was measured a token costs what the longest measured ones did, not nothing.
    assert model.coefficients_["prefill_token_beyond"] > 0


@pytest.mark.parametrize(
    ("rare", "common", "message"),
    [
        (StepKind.PREFILL, StepKind.DECODE, "prefill_tokens .* steps that only prefill"),
        (StepKind.DECODE, StepKind.PREFILL, "num_decodes .* steps that only decode"),
    ],
)
def test_pooled_names_the_pure_steps_that_it_lacks(rare, common, message):
    rows = np.concatenate(
        [
            random_rows(18, seed=4, kinds=(rare, StepKind.MIXED)),
            random_rows(99, seed=5, kinds=(common,)),
        ]
    )
    with pytest.raises(ValueError, match=message):
        unfitted("pooled").fit(rows, np.ones(len(rows)))


@pytest.mark.parametrize("pure", [StepKind.PREFILL, StepKind.DECODE])
def test_pooled_learns_a_kind_that_hardly_occurs_alone_from_mixed_steps(pure):
    truth, kinds = true_model("pooled"), (StepKind.MIXED, pure)
    rows = random_rows(600, seed=6, kinds=kinds)
    model = unfitted("pooled").fit(rows, measured(truth, rows, noise=0.02, seed=7))
    unseen = random_rows(300, seed=8, kinds=kinds)
    errors = held_out_errors(model, (unseen, truth.predict_rows_s(unseen)))
    assert max(one.mape for one in errors.values()) < 0.08
    assert model.coefficients_["mixing"] == 1.0


def test_pooled_learns_from_mixed_steps_what_prefills_alone_did_not_show():
    """With mixed chunks short prompts prefill alone, and long ones beside decodes."""
    truth = true_model("pooled")
    prefills = random_rows(900, seed=15, kinds=(StepKind.PREFILL,))
    short = prefills[(prefills[:, 1] < 100) & (prefills[:, 2] == 0)]
    others = random_rows(400, seed=16, kinds=(StepKind.MIXED, StepKind.DECODE))
    rows = np.concatenate([short, others])
    assert 0 < len(short) < len(others) / 2
    model = unfitted("pooled").fit(rows, measured(truth, rows, noise=0.02, seed=17))
    unseen = random_rows(600, seed=18)
    errors = held_out_errors(model, (unseen, truth.predict_rows_s(unseen)))
    assert max(one.mape for one in errors.values()) < 0.03
    assert model.coefficients_["mixing"] == pytest.approx(0.4, abs=0.1)


def test_pooled_does_not_take_a_few_odd_prefills_for_what_mixed_steps_show():
    """A few steps that only prefilled, all slow for another reason, beside hundreds of both."""
    truth = true_model("pooled").with_coefficients(
        {**true_model("pooled").coefficients_, "mixing": 1.0}
    )
    rows = np.concatenate(
        [
            random_rows(24, seed=6, kinds=(StepKind.PREFILL,)),
            random_rows(400, seed=7, kinds=(StepKind.MIXED, StepKind.DECODE)),
        ]
    )
    times_s = truth.predict_rows_s(rows)
    times_s[:24] = np.random.default_rng(8).uniform(1.0, 30.0, 24) * times_s[:24].mean()
    model = unfitted("pooled").fit(rows, times_s)
    unseen = random_rows(300, seed=9, kinds=(StepKind.MIXED, StepKind.DECODE))
    errors = held_out_errors(model, (unseen, truth.predict_rows_s(unseen)))
    assert max(one.mape for one in errors.values()) < 0.2


@pytest.mark.parametrize("name", ["decode_overlap", "prefill_overlap"])
def test_pooled_refuses_an_overlap_above_one(name):
    with pytest.raises(ValueError, match=rf"coefficients\.{name} is 1\.5; above 1"):
        predicted_s("pooled", [(1, 0)], **{name: 1.5})


def test_pooled_refuses_a_mixing_above_one():
    with pytest.raises(ValueError, match=r"coefficients\.mixing is 1\.5; above 1"):
        predicted_s("pooled", [], mixing=1.5)


# Linear (HyGen eq. 1) and BROS (4.1)


def test_linear_sums_the_totals_and_their_squares():
    batch = [(10, 5), (20, 0), (0, 100), (0, 200), (0, 300)]
    weights = {
        "prefill_token": 1e1,
        "prefill_token_square": 1e-1,
        "prefill_request": 1e2,
        "decode_token": 1e0,
        "decode_token_square": 1e-3,
        "decode_request": 1e3,
        "step": 7.0,
    }
    expected = 1e1 * 30 + 1e-1 * 30**2 + 1e2 * 2 + 1e0 * 600 + 1e-3 * 600**2 + 1e3 * 3 + 7
    assert predicted_s("linear", batch, **weights) == pytest.approx(expected)


def test_bros_multiplies_tokens_by_context_in_each_half():
    batch = [(10, 5), (20, 0), (0, 100), (0, 200)]
    weights = {
        "prefill_token": 2.0,
        "prefill_token_context": 0.1,
        "prefill_step": 3.0,
        "decode_request": 5.0,
        "decode_request_context": 0.01,
        "decode_step": 11.0,
    }
    prefill_s = 2.0 * 30 + 0.1 * 30 * (30 + 5) + 3.0
    assert predicted_s("bros", batch[:2], **weights) == pytest.approx(prefill_s)
    decode_s = 5.0 * 2 + 0.01 * 2 * 300 + 11.0
    assert predicted_s("bros", batch[2:], **weights) == pytest.approx(decode_s)
    assert predicted_s("bros", batch, **weights) == pytest.approx(prefill_s + decode_s)


# Roofline (OOCO tables 2-4)

TOY = Transformer(
    num_layers=3,
    hidden=8,
    num_heads=4,
    num_kv_heads=2,
    intermediate=16,
    vocab=50,
    dtype_bytes=2,
    head_dim=2,
)
LAYER_WEIGHTS = 8 * 16 + 8 * 8 + 8 * 32 + 16 * 8
HEAD_WEIGHTS = 8 * 50


def toy_s(batch, **coefficients):
    model = create_batch_time("roofline", transformer=TOY)
    zeros = dict.fromkeys(model.COEFFICIENTS, 0.0)
    return model.with_coefficients({**zeros, **coefficients}).predict_s(shape_of(batch))


def test_a_head_is_its_share_of_the_hidden_size_unless_it_is_told():
    sizes = {**dataclasses.asdict(TOY), "hidden": 64}
    assert Transformer(**sizes).head_dim == 2
    assert Transformer(**{**sizes, "head_dim": 0}).head_dim == 64 // 4


def test_roofline_counts_two_flops_per_weight_and_row():
    # Five rows go through the layers, two sequences through the head.
    batch = [(4, 6), (0, 9)]
    expected = 2 * (3 * LAYER_WEIGHTS * 5 + HEAD_WEIGHTS * 2)
    assert toy_s(batch, gemm_flop=1.0) == expected


def test_roofline_reads_every_weight_once_and_the_rows_in_and_out():
    rows = 3 * 5 * ((8 + 16) + (8 + 8) + (8 + 32) + (16 + 8)) + 2 * (8 + 50)
    expected = 2 * (3 * LAYER_WEIGHTS + HEAD_WEIGHTS + rows)
    assert toy_s([(4, 6), (0, 9)], gemm_byte=1.0) == expected


def test_roofline_counts_attention_over_the_causal_half():
    # Queries at 6..9 attend to 7, 8, 9 and 10 keys; OOCO's 4 D S_q S_kv counts 10 for all.
    per_key = 3 * 4 * 8
    pairs = 4 * 6 + 4 * 4 / 2
    assert toy_s([(4, 6)], prefill_attention_flop=1.0) == per_key * pairs
    assert toy_s([(0, 9)], decode_attention_flop=1.0) == per_key * 9


def test_roofline_reads_queries_of_all_heads_and_keys_of_the_shared_ones():
    # Twice (in and out; keys and values), two bytes, three layers; 8 query and 4 KV features.
    assert toy_s([(4, 6)], attention_byte=1.0) == 2 * 2 * 3 * (4 * 8 + 10 * 4)
    assert toy_s([(0, 9)], attention_byte=1.0) == 2 * 2 * 3 * (1 * 8 + 9 * 4)


def test_roofline_takes_the_slower_limit_of_each_operator_and_one_overhead():
    shape = [(0, 9)]
    memory_s, compute_s = toy_s(shape, gemm_byte=1.0), toy_s(shape, gemm_flop=1e-3)
    both_s = toy_s(shape, gemm_byte=1.0, gemm_flop=1e-3, step=5.0)
    assert both_s == max(memory_s, compute_s) + 5.0


def test_roofline_prices_decodes_flat_until_compute_binds():
    # Weights dominate: 64 decodes cost little more than one, 6,400 much more.
    model = true_model("roofline")
    one, few, many = (model.predict_s(shape_of([(0, 1)] * n)) for n in (1, 8, 6400))
    assert few < 1.5 * one < many


def test_roofline_finds_the_achieved_rates():
    truth, rows = true_model("roofline"), random_rows(900, seed=5)
    model = unfitted("roofline").fit(rows, measured(truth, rows, noise=0.01, seed=6))
    for name in ("gemm_flop", "gemm_byte", "attention_byte", "step"):
        assert model.coefficients_[name] == pytest.approx(truth.coefficients_[name], rel=0.1)


def test_a_transformer_derives_the_head_size_and_refuses_sizes_that_are_not_counts():
    assert SMALL_LLAMA.head_dim == 256 // 8
    assert replace(SMALL_LLAMA, head_dim=128).head_dim == 128
    for wrong in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match=r"transformer\.num_layers is .*; it must be a whole"):
            replace(SMALL_LLAMA, num_layers=wrong)
