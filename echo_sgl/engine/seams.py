"""Every place where Echo touches SGLang, with the signature that it was built against.

One list serves the start-up check, the registration and `echo-sgl doctor`.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from echo_sgl.engine.settings import KNOWN_SGLANG_VERSION

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_BATCH = "sglang.srt.managers.schedule_batch"
_POLICY = "sglang.srt.managers.schedule_policy"
_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_CORE = "sglang.srt.mem_cache.unified_cache.unified_tree_core.UnifiedTreeCore"
_HTTP = "sglang.srt.entrypoints.http_server"
_SERVING = "sglang.srt.entrypoints.openai"
_TOKENIZER_MODULE = "sglang.srt.managers.tokenizer_manager"
_TOKENIZER = f"{_TOKENIZER_MODULE}.TokenizerManager"


@dataclass(frozen=True, slots=True)
class Seam:
    """A callable of SGLang's that Echo hooks, overrides or calls, and its parameters."""

    target: str
    parameters: str

    def resolve(self) -> Any:
        owner, _, name = self.target.rpartition(".")
        return inspect.getattr_static(pkgutil.resolve_name(owner), name)

    def problem(self) -> str | None:
        """What is wrong with this seam in the installed SGLang, or None."""
        try:
            found = self.resolve()
        except (ImportError, AttributeError) as error:
            return f"{self.target} is missing ({error})"
        except Exception as error:  # noqa: BLE001 - a library or a driver that cannot be loaded
            return f"{self.target} cannot be imported ({type(error).__name__}: {error})"
        if isinstance(found, staticmethod | classmethod):
            found = found.__func__
        parameters = " ".join(inspect.signature(inspect.unwrap(found)).parameters)
        if parameters != self.parameters:
            return f"{self.target} takes ({parameters}), Echo was built for ({self.parameters})"
        return None


@dataclass(frozen=True, slots=True)
class Hook:
    """What Echo puts at a seam; `kind` is SGLang's hook type in lower case."""

    seam: Seam
    kind: str
    load: Callable[[], Any]


# Overridden or called, not hooked: the scheduler subclass and the prefill adder rely on them.
RELIED_ON = (
    Seam(f"{_SCHEDULER}.__init__", "self server_args port_args"),
    Seam(f"{_SCHEDULER}.init_running_status", "self"),
    Seam(f"{_SCHEDULER}.init_schedule_policy", "self"),
    Seam(f"{_SCHEDULER}.init_load_inquirer", "self"),
    Seam(f"{_SCHEDULER}.get_prefill_adder_class", "self"),
    Seam(f"{_SCHEDULER}.init_lora_drainer", "self"),
    Seam(
        "sglang.srt.lora.lora_drainer.LoRADrainer.update_draining_state",
        "self waiting_queue running_reqs",
    ),
    Seam(f"{_SCHEDULER}._add_request_to_queue", "self req is_retracted"),
    Seam(f"{_SCHEDULER}._set_or_validate_priority", "self req"),
    Seam(f"{_SCHEDULER}._release_aborted_request", "self req"),
    Seam(f"{_SCHEDULER}._abort_on_queued_limit", "self recv_req"),
    Seam(f"{_SCHEDULER}.check_truncation_align_fits_chunk", "self"),
    Seam(f"{_SCHEDULER}._prefetch_kvcache", "self req storage_hit_end"),
    Seam(f"{_SCHEDULER}.send_abort_output", "self abort_req req"),
    Seam(f"{_SCHEDULER}.abort_request", "self recv_req"),
    Seam(f"{_SCHEDULER}._poll_timeout_aborts", "self"),
    Seam(f"{_SCHEDULER}.record_weight_version_change", "self new_version"),
    Seam(f"{_SCHEDULER}.is_fully_idle", "self for_health_check ignore_waiting"),
    Seam(f"{_CACHE}.checkpoint_into_tree", "self req up_to kwargs"),
    Seam(f"{_CACHE}.checkpoint", "self req up_to kwargs"),
    Seam(f"{_CACHE}.touch_prefix", "self key"),
    Seam(f"{_CACHE}.on_release", "self req checkpointed"),
    Seam(f"{_CACHE}.claim_kv_row", "self req"),
    Seam(f"{_CORE}.__init__", "self params components"),
    Seam(f"{_CORE}.reset", "self"),
    Seam(f"{_CORE}.match_prefix", "self params"),
    Seam(f"{_CORE}.begin_insert", "self params"),
    Seam(f"{_CORE}._add_new_node", "self parent key value priority session_id rotation_base"),
    Seam(f"{_CORE}._insert_tail_step", "self state"),
    Seam(f"{_CORE}._touch_node", "self node"),
    Seam(f"{_CORE}._split_node", "self key child split_len"),
    Seam(f"{_CORE}._remove_leaf_from_parent", "self node"),
    Seam(f"{_CORE}._update_evictable_leaf_sets", "self node"),
    Seam(f"{_CORE}.evict_device_start", "self component_type request_cnt"),
    Seam(f"{_CORE}.evict_device_next_node", "self component_type tracker"),
    Seam(f"{_CORE}.evict_device_leaf", "self node_id is_write_back"),
    Seam(f"{_CORE}.evict_device_end", "self component_type"),
    Seam(f"{_CORE}.demote", "self node_id"),
    Seam(f"{_CORE}.drop_subtree_no_host", "self node_id"),
    Seam(f"{_CORE}._evict_host_leaf", "self node tracker device_frees host_frees cache_actions"),
    Seam(
        "sglang.srt.mem_cache.unified_cache.tree_core_registry.register_tree_core_backend",
        "name factory",
    ),
    Seam(f"{_SCHEDULER}.process_input_requests", "self recv_reqs"),
    Seam(f"{_SCHEDULER}.get_internal_state", "self recv_req"),
    Seam(f"{_SCHEDULER}.set_internal_state", "self recv_req"),
    Seam(f"{_SCHEDULER}.run_batch", "self batch pp_proxy_tensors"),
    Seam("sglang.srt.utils.device_timer.device_timer_ctx", "timer category"),
    Seam(f"{_SCHEDULER}._should_defer_prefill", "self running_batch"),
    Seam(f"{_SCHEDULER}.get_next_batch_to_run", "self running_batch last_batch"),
    Seam(f"{_SCHEDULER}.update_running_batch", "self batch"),
    Seam(f"{_SCHEDULER}._reqs_finishing_inflight", "self batch"),
    Seam(f"{_SCHEDULER}.init_invariant_checker", "self"),
    Seam(f"{_SCHEDULER}.pause_generation", "self recv_req"),
    Seam(f"{_BATCH}.ScheduleBatch.merge_batch", "self other"),
    Seam(f"{_BATCH}.ScheduleBatch.check_decode_mem", "self selected_indices"),
    Seam(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.filter_batch",
        "self keep_indices keep_indices_device",
    ),
    Seam(
        "sglang.srt.sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator.__init__",
        "self vocab_size batch penalizers",
    ),
    Seam("sglang.srt.sampling.penaltylib.orchestrator._BatchedPenalizer.is_prepared", "self"),
    Seam(
        f"{_SCHEDULER}._get_new_batch_prefill_raw",
        "self prefill_delayer_single_pass running_batch",
    ),
    Seam("sglang.srt.managers.scheduler._make_abort_req", "req finished_reason"),
    Seam(f"{_TOKENIZER}._dispatch_to_scheduler", "self obj"),
    Seam(f"{_TOKENIZER}.abort_request", "self rid abort_all"),
    Seam(
        f"{_BATCH}.retract_all",
        "reqs req_to_token_pool token_to_kv_pool_allocator tree_cache "
        "hisparse_coordinator offload_kv",
    ),
    Seam(f"{_BATCH}.Req._compute_max_prefix_len", "self input_len"),
    Seam(f"{_BATCH}.ScheduleBatch.filter_batch", "self reqs_to_exclude keep_indices"),
    Seam(
        f"{_POLICY}.SchedulePolicy.calc_priority",
        "self waiting_queue running_batch processed_tokens",
    ),
    Seam(
        f"{_POLICY}.SchedulePolicy.shortest_prefill_chunk_limit",
        "self chunked_req waiting_queue budget page_size",
    ),
    Seam(f"{_POLICY}.PrefillAdder.add_one_req", "self req has_chunked_req truncation_align_size"),
    Seam(f"{_POLICY}.PrefillAdder.add_chunked_req", "self req"),
    Seam(f"{_POLICY}.PrefillAdder.preempt_to_schedule", "self req"),
    Seam(f"{_POLICY}.PrefillAdder._get_running_request_total_token_offset", "self req"),
    Seam(
        "sglang.srt.managers.scheduler_components.load_inquirer.SchedulerLoadInquirer.get_loads",
        "self",
    ),
)


_WEIGHT_UPDATES = {
    "update_weights_from_disk": "self obj request",
    "update_weights_from_distributed": "self obj request",
    "update_weights_from_tensor": "self obj request",
    "update_weights_from_ipc": "self obj request",
    "_weight_update_session_call": "self communicator obj",
}


def _scheduler() -> Any:
    from echo_sgl.engine.scheduler import EchoScheduler

    return EchoScheduler


def _radix_cache() -> Any:
    from echo_sgl.engine.cache.radix_cache import EchoRadixCache

    return EchoRadixCache


def _ours(name: str) -> Callable[[], Any]:
    return lambda: pkgutil.resolve_name(f"echo_sgl.engine.{name}")


HOOKS = (
    Hook(Seam(_SCHEDULER, "server_args port_args"), "replace", _scheduler),
    Hook(Seam(_CACHE, "params"), "replace", _radix_cache),
    Hook(
        Seam(f"{_BATCH}.ScheduleBatch.release_req", "self idx remaing_req_count offload_kv"),
        "before",
        _ours("cache.radix_cache.keep_retracted_prefix"),
    ),
    Hook(
        Seam(f"{_BATCH}.ScheduleBatch._get_decode_retraction_order", "reqs"),
        "after",
        _ours("admission.prefill_adder.decode_retraction_order"),
    ),
    Hook(
        Seam(
            f"{_SERVING}.serving_base.OpenAIServingBase.handle_request",
            "self request raw_request",
        ),
        "around",
        _ours("http.tags.read_service_tier"),
    ),
    Hook(
        Seam(
            f"{_SERVING}.serving_chat.OpenAIServingChat._convert_to_internal_request",
            "self request raw_request",
        ),
        "after",
        _ours("http.tags.tag_converted_request"),
    ),
    Hook(
        Seam(
            f"{_SERVING}.serving_completions.OpenAIServingCompletion._convert_to_internal_request",
            "self request raw_request",
        ),
        "after",
        _ours("http.tags.tag_converted_request"),
    ),
    Hook(
        Seam(
            f"{_TOKENIZER}._create_tokenized_object",
            "self obj input_text input_ids input_embeds mm_inputs token_type_ids",
        ),
        "before",
        _ours("http.tags.check_and_stamp"),
    ),
    Hook(
        Seam(f"{_TOKENIZER}._tokenize_one_request", "self obj"),
        "around",
        _ours("http.turns.one_prompt_at_a_time"),
    ),
    Hook(
        Seam(f"{_TOKENIZER}.init_metric_collector_watchdog", "self"),
        "after",
        _ours("metrics.request_metrics.create_request_metrics"),
    ),
    Hook(
        Seam(f"{_TOKENIZER}.collect_metrics", "self state recv_obj i"),
        "after",
        _ours("metrics.request_metrics.observe_output"),
    ),
    Hook(
        Seam(f"{_TOKENIZER}._handle_abort_req", "self recv_obj"),
        "before",
        _ours("metrics.request_metrics.observe_queued_abort"),
    ),
    Hook(
        Seam(f"{_TOKENIZER_MODULE}.SignalHandler.sigterm_handler", "self signum frame"),
        "after",
        _ours("http.shutdown.end_offline_requests"),
    ),
    *(
        Hook(
            Seam(f"{_TOKENIZER}.{name}", parameters),
            "around",
            _ours("http.weights.hand_back_offline"),
        )
        for name, parameters in _WEIGHT_UPDATES.items()
    ),
    Hook(
        Seam(f"{_TOKENIZER}._unload_lora_adapter_locked", "self obj"),
        "around",
        _ours("http.weights.hand_back_adapter"),
    ),
    Hook(
        Seam(
            f"{_HTTP}._setup_and_run_http_server",
            "server_args tokenizer_manager template_manager port_args scheduler_infos "
            "subprocess_watchdog execute_warmup_func launch_callback",
        ),
        "before",
        _ours("http.routes.add_routes"),
    ),
    Hook(
        Seam(
            "sglang.srt.utils.auth.decide_request_auth",
            "method path authorization_header api_key admin_api_key auth_level",
        ),
        "after",
        _ours("http.batch_routes.admit_tenants"),
    ),
    Hook(
        Seam("sglang.srt.server_args.ServerArgs.check_server_args", "self"),
        "after",
        _ours("install.check_resolved_server_args"),
    ),
)


def version_problem() -> str | None:
    """Why the installed SGLang cannot be used, or None."""
    try:
        installed = version("sglang")
    except PackageNotFoundError:
        return "SGLang is not installed; install echo-sgl with its dependencies"
    if installed != KNOWN_SGLANG_VERSION:
        return (
            f"SGLang {installed} is installed, Echo knows {KNOWN_SGLANG_VERSION}; "
            f"install sglang=={KNOWN_SGLANG_VERSION}"
        )
    return None


def engine_problems() -> list[str]:
    """All that is wrong with the installed SGLang; imports it."""
    if problem := version_problem():
        return [problem]
    seams = [*RELIED_ON, *(hook.seam for hook in HOOKS)]
    return [problem for seam in seams if (problem := seam.problem())]
