"""What happens when the installed SGLang is not the one that Echo knows."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from importlib.metadata import version
from types import SimpleNamespace

import pytest

from echo_sgl.config import parse_config
from echo_sgl.engine import install, seams
from echo_sgl.engine.settings import refuse_aligned_chunks, refuse_foreign_cache, refuse_unsupported
from echo_sgl.errors import UnsupportedEngineError

SUPPORTED = {
    "pp_size": 1,
    "disaggregation_mode": "null",
    "enable_dp_attention": False,
    "speculative_algorithm": None,
    "tokenizer_worker_num": 1,
    "enable_pdmux": False,
    "enable_hisparse": False,
    "dllm_algorithm": None,
    "enable_session_radix_cache": False,
    "enable_lmcache": False,
    "enable_flexkv": False,
    "enable_unified_cache_external_linker": False,
    "hicache_host_memory_mode": "cache",
    "use_ray": False,
    "smg_grpc_mode": False,
    "grpc_mode": False,
    "encoder_only": False,
    "strip_thinking_cache": False,
    "scheduler_recv_interval": 1,
    "tp_size": 1,
    "min_free_slots_delay": None,
    "radix_cache_backend": None,
    "radix_eviction_policy": "lru",
}
RETRACTION_ORDER = next(hook for hook in seams.HOOKS if "retraction_order" in hook.seam.target)


def test_every_seam_fits_the_installed_sglang():
    assert version("sglang") == seams.KNOWN_SGLANG_VERSION
    assert seams.engine_problems() == []


def test_a_missing_symbol_is_named():
    target = "sglang.srt.managers.scheduler.Scheduler.no_such_method"
    assert f"{target} is missing" in seams.Seam(target, "self").problem()


def test_a_missing_module_is_named():
    assert "sglang.srt.gone.thing is missing" in seams.Seam("sglang.srt.gone.thing", "").problem()


def test_an_engine_that_cannot_be_imported_is_named_with_its_cause(monkeypatch):
    def fail(name: str) -> None:
        raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(seams.pkgutil, "resolve_name", fail)
    problem = seams.Seam("sglang.srt.gone.thing", "").problem()
    assert "cannot be imported (OSError: libcudart.so.12: cannot open" in problem


def test_a_changed_signature_is_named_with_both_sides():
    seam = dataclasses.replace(RETRACTION_ORDER.seam, parameters="self reqs extra")
    problem = seam.problem()
    assert "takes (reqs), Echo was built for (self reqs extra)" in problem


def test_another_version_is_refused_by_its_number(monkeypatch):
    monkeypatch.setattr(seams, "version", lambda name: "0.6.0")
    [problem] = seams.engine_problems()
    assert problem == ("SGLang 0.6.0 is installed, Echo knows 0.5.23; install sglang==0.5.23")


def test_a_hook_that_did_not_take_is_found():
    hook = RETRACTION_ORDER
    assert install.hooks_not_taken({hook: hook.load()}) == [hook.seam.target]


@pytest.mark.parametrize(
    ("setting", "value", "flag"),
    [
        ("pp_size", 2, "--pp-size > 1"),
        ("disaggregation_mode", "prefill", "--disaggregation-mode"),
        ("enable_dp_attention", True, "--enable-dp-attention"),
        ("speculative_algorithm", "EAGLE", "--speculative-algorithm"),
        ("tokenizer_worker_num", 4, "--tokenizer-worker-num > 1"),
        ("enable_pdmux", True, "--enable-pdmux"),
        ("enable_hisparse", True, "--enable-hisparse"),
        ("dllm_algorithm", "x", "--dllm-algorithm"),
        ("enable_session_radix_cache", True, "--enable-session-radix-cache"),
        ("enable_lmcache", True, "--enable-lmcache"),
        ("enable_flexkv", True, "--enable-flexkv"),
        ("strip_thinking_cache", True, "--strip-thinking-cache"),
        ("min_free_slots_delay", 4, "--min-free-slots-delay"),
        ("radix_cache_backend", "mine", "--radix-cache-backend"),
        ("enable_unified_cache_external_linker", True, "--enable-unified-cache-external-linker"),
        ("hicache_host_memory_mode", "buffer_only", "--hicache-host-memory-mode buffer_only"),
        ("use_ray", True, "--use-ray"),
        ("smg_grpc_mode", True, "--smg-grpc-mode"),
        ("grpc_mode", True, "--smg-grpc-mode"),
        ("encoder_only", True, "--encoder-only"),
        ("radix_eviction_policy", "lfu", "--radix-eviction-policy"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(setting, value, flag):
    config = parse_config({})
    refuse_unsupported(SimpleNamespace(**SUPPORTED), config)
    with pytest.raises(UnsupportedEngineError, match=f"does not support {flag}"):
        refuse_unsupported(SimpleNamespace(**SUPPORTED | {setting: value}), config)


@pytest.mark.parametrize(("given", "is_refused"), [("1", True), ("yes", True), ("False", False)])
def test_sglangs_rust_server_is_refused_where_sglang_would_start_it(given, is_refused, monkeypatch):
    monkeypatch.setenv("SGLANG_RUST_SERVER", given)
    refusal = pytest.raises(UnsupportedEngineError, match="does not support SGLANG_RUST_SERVER")
    with refusal if is_refused else nullcontext():
        refuse_unsupported(SimpleNamespace(**SUPPORTED), parse_config({}))


def test_ticks_that_would_be_lost_are_refused():
    rarely = SUPPORTED | {"scheduler_recv_interval": 4}
    refuse_unsupported(SimpleNamespace(**rarely), parse_config({}))
    with pytest.raises(UnsupportedEngineError, match="--scheduler-recv-interval > 1"):
        refuse_unsupported(SimpleNamespace(**rarely | {"tp_size": 2}), parse_config({}))


def test_chunks_that_no_limit_may_cut_are_refused():
    refuse_aligned_chunks(None)
    with pytest.raises(UnsupportedEngineError, match="a multiple of 4096 tokens"):
        refuse_aligned_chunks(4096)


def test_models_whose_kv_is_in_another_cache_are_refused():
    refuse_foreign_cache(SimpleNamespace(echo_core=None))
    with pytest.raises(UnsupportedEngineError, match=r"keeps its KV in int, .*Switch Echo off"):
        refuse_foreign_cache(7)


def test_sglangs_own_eviction_policies_stay_with_its_own_tree():
    server_args = SimpleNamespace(**SUPPORTED | {"radix_eviction_policy": "lfu"})
    refuse_unsupported(server_args, parse_config({"cache": {"order": "stock"}}))
