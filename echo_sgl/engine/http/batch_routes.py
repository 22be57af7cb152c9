"""The batch service on SGLang's server: same port, same process, same API key."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echo_sgl.batches.http.api_errors import EnvelopedRefusals
from echo_sgl.batches.http.tenants import FileTenants, KeysFileError, Tenants
from echo_sgl.batches.lines.job_line import CHAT_URL, COMPLETIONS_URL, EMBEDDINGS_URL
from echo_sgl.config import DATABASE_URL_ENV, KEYS_FILE_ENV, STATE_DIR_ENV
from echo_sgl.engine.settings import active_config

if TYPE_CHECKING:
    from echo_sgl.batches.dispatch.progress import LateProgress

TENANT_PATHS = "/v1/"
_FROM_TENSORS = "__tensor__"  # SGLang's path of an adapter that came over the network

_root_path = ""
_progress: LateProgress | None = None
_tenants: Tenants | None = None


def add_to_server(app: Any, server_args: Any, tokenizer_manager: Any) -> None:
    """Put files and batches beside SGLang's routes when a state directory is named.

    Errors: `EchoError` when the directory, its database or the keys file cannot be used.
    """
    global _progress, _tenants, _root_path  # noqa: PLW0603 - SGLang's hooks have no owner
    envelop_refusals(app)
    _root_path = server_args.fastapi_root_path or ""
    state_dir = os.environ.get(STATE_DIR_ENV)
    if not state_dir:
        return
    from echo_sgl.batches.assembly import add_batch_service
    from echo_sgl.batches.dispatch.line_engine import AsgiEngine
    from echo_sgl.batches.store.job_store import open_store

    _tenants = read_tenants(server_args.api_key)
    engine = AsgiEngine(
        app,
        endpoints=endpoints_of(tokenizer_manager),
        api_key=server_args.api_key,
        is_ready=lambda: is_up(tokenizer_manager),
        abort=lambda rid: abort(tokenizer_manager, rid),
        unlisted=lambda: evicted_adapters(tokenizer_manager),
        max_requests=pool_capacity(tokenizer_manager),
    )
    store = open_store(Path(state_dir), os.environ.get(DATABASE_URL_ENV))
    _progress = add_batch_service(
        app,
        store,
        active_config().batches,
        engine,
        _tenants,
        with_metrics=server_args.enable_metrics,
    )


def envelop_refusals(app: Any) -> None:
    """Answer wrong keys on our paths in OpenAI's form.

    SGLang adds its check of keys after our hook, and so outside of any middleware that we add:
    ours goes around all of them.
    """
    build = app.build_middleware_stack
    app.build_middleware_stack = lambda: EnvelopedRefusals(build())


def read_tenants(api_key: str | None) -> Tenants:
    """The holders of keys: the operator's `--api-key` and those of the keys file.

    Errors: `KeysFileError`.
    """
    keys_file = os.environ.get(KEYS_FILE_ENV)
    if keys_file and not api_key:
        raise KeysFileError(
            "--echo-keys-file needs SGLang's --api-key too: without it the server would answer "
            "anybody beside the holders of keys"
        )
    return FileTenants(api_key, Path(keys_file)) if api_key and keys_file else Tenants(api_key)


def begin_stop() -> None:
    """Send no more lines: the server drains."""
    if _progress is not None and _progress.dispatcher is not None:
        _progress.dispatcher.begin_stop()


def admit_tenants(
    decision: Any,
    *,
    method: str,
    path: str,
    authorization_header: str | None,
    api_key: str | None,
    admin_api_key: str | None,
    auth_level: Any,
) -> Any:
    """After SGLang refused a key: let tenants of the keys file use the `/v1/` routes."""
    if decision.allowed or _tenants is None:
        return decision
    is_ours = path.removeprefix(_root_path).startswith(TENANT_PATHS)
    is_open = is_ours and auth_level == "normal"
    if is_open and _tenants.of_header(authorization_header) is not None:
        return type(decision)(allowed=True)
    return decision


def endpoints_of(tokenizer_manager: Any) -> tuple[str, ...]:
    """URLs that the served model can answer."""
    if tokenizer_manager.is_generation:
        return (CHAT_URL, COMPLETIONS_URL)
    return (EMBEDDINGS_URL,)


def pool_capacity(tokenizer_manager: Any) -> int | None:
    """How many offline requests wait at a time; embeddings are none."""
    if not tokenizer_manager.is_generation:
        return None
    return active_config().offline.max_pool_requests


def evicted_adapters(tokenizer_manager: Any) -> list[str]:
    """LoRA adapters that SGLang does not list, but loads again for the next request that names one.

    It unloads the least recently used above `--max-loaded-loras`, and keeps where each came from;
    of those that came as tensors it has nothing to load.
    """
    if not tokenizer_manager.enable_lora:
        return []
    loaded = tokenizer_manager.lora_registry.get_all_adapters()
    return [
        name
        for name, reference in tokenizer_manager.lora_ref_cache.items()
        if name not in loaded and reference.lora_path != _FROM_TENSORS
    ]


def is_up(tokenizer_manager: Any) -> bool:
    """Whether the warm-up is over: SGLang ends when work of ours has it refused."""
    from sglang.srt.managers.tokenizer_manager import ServerStatus

    return bool(tokenizer_manager.server_status == ServerStatus.Up)


def abort(tokenizer_manager: Any, rid: str) -> None:
    """End a request; one with several prompts or choices has an id for each.

    Only what the scheduler has: it forgets the abort of a request that comes later, and SGLang
    sends no second one. What is not sent yet is ended by a later call, or when its task is.
    """
    states = tokenizer_manager.rid_to_state
    known = [rid] if rid in states else [name for name in states if name.startswith(f"{rid}_")]
    for name in known:
        if states[name].dispatched:
            tokenizer_manager.abort_request(name)
