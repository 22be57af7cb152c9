"""Register Echo's hooks with SGLang, and stop the server when one did not take.

SGLang logs and skips a plugin or a hook that fails, and would go on serving without Echo.
So the check runs inside `HookRegistry.apply_hooks`, and it ends the process by SystemExit,
which is not an `Exception` and so is not skipped.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any, NoReturn

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from echo_sgl.engine.seams import HOOKS, Hook, engine_problems
from echo_sgl.engine.settings import (
    KNOWN_SGLANG_VERSION,
    active_config,
    refuse_unsupported,
)
from echo_sgl.errors import EchoError


def install() -> None:
    """Check the engine, register every hook, and have the registry verify them."""
    try:
        active_config()
    except EchoError as error:
        stop(str(error))
    if problems := engine_problems():
        stop("; ".join(problems))
    loaded = {hook: hook.load() for hook in HOOKS}
    for hook, callback in loaded.items():
        HookRegistry.register(hook.seam.target, callback, HookType[hook.kind.upper()])
    _verify_after_apply(loaded)


def check_resolved_server_args(result: Any, server_args: Any) -> None:
    """After SGLang checked its own settings: refuse, by name, what Echo does not support."""
    try:
        refuse_unsupported(server_args, active_config())
    except EchoError as error:
        stop(str(error))


def hooks_not_taken(loaded: dict[Hook, Any]) -> list[str]:
    """Targets that do not lead to our hook after SGLang applied its registry."""
    return [hook.seam.target for hook, callback in loaded.items() if not _is_taken(hook, callback)]


def stop(reason: str) -> NoReturn:
    sys.exit(f"echo-sgl: {reason}")


def _verify_after_apply(loaded: dict[Hook, Any]) -> None:
    apply_hooks = HookRegistry.apply_hooks

    def apply_and_verify() -> None:
        apply_hooks()
        if missing := hooks_not_taken(loaded):
            stop(f"SGLang {KNOWN_SGLANG_VERSION} did not apply the hook on {', '.join(missing)}")

    HookRegistry.apply_hooks = apply_and_verify


def _is_taken(hook: Hook, callback: Any) -> bool:
    """Whether calling the target runs the callback: as the class, or in a wrapper's closure."""
    found = hook.seam.resolve()
    if found is callback:
        return True
    found = found.__func__ if isinstance(found, staticmethod | classmethod) else found
    while found is not None:
        if callback in inspect.getclosurevars(found).nonlocals.values():
            return True
        found = getattr(found, "__wrapped__", None)
    return False
