"""Off: nothing of Echo is there. On but unable: the server does not start as stock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from echo_sgl.config import CONFIG_ENV, resolve_config_path
from echo_sgl.engine.seams import HOOKS
from eval.servers.server import CPU_ARGS
from tests.quick_start.zygote import Zygote
from tests.servers import ServerPool

pytestmark = pytest.mark.server

REPORT = """
import json, sys
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
load_plugins()
ours = {
    target
    for target, hooks in HookRegistry._hooks.items()
    if any(source.plugin_name == "echo_sgl" for _, _, source in hooks)
}
print(json.dumps({
    "hooks": sorted(ours),
    "patched": sorted(ours & HookRegistry._patched),
    "engine": sorted(name for name in sys.modules if name.startswith("echo_sgl.engine")),
}))
"""


def run(
    *command: str, config: Path | str | None = None, zygote: Zygote | None = None, **env: str
) -> subprocess.CompletedProcess:
    """A Python of its own; with a zygote, one that imported SGLang before it loads plugins."""
    full = {key: value for key, value in os.environ.items() if key != CONFIG_ENV}
    full |= {CONFIG_ENV: str(config)} if config else {}
    argv, env = [sys.executable, *command], full | env
    if zygote is not None:
        return zygote.run(argv, env=env, timeout_s=300)
    return subprocess.run(argv, check=False, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture
def serve(server_for: ServerPool, tiny_model: Path) -> Callable[..., subprocess.CompletedProcess]:
    script = str(Path(sys.executable).with_name("sglang"))
    command = (script, "serve", "--model-path", str(tiny_model), *CPU_ARGS)
    return lambda *args, config: run(*command, *args, config=config, zygote=server_for.zygote)


def test_off_means_no_hook_and_no_engine_code():
    report = json.loads(run("-c", REPORT).stdout.splitlines()[-1])
    assert report == {"hooks": [], "patched": [], "engine": []}


def test_on_means_every_hook_is_applied():
    result = run("-c", REPORT, config=resolve_config_path("echo"))
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["hooks"] == sorted(hook.seam.target for hook in HOOKS)
    assert report["patched"] == report["hooks"]


def test_a_config_that_is_not_there_stops_the_server_with_its_name(serve):
    result = serve(config="/nowhere/echo.toml")
    assert result.returncode != 0
    assert "echo-sgl: config file /nowhere/echo.toml cannot be read" in result.stderr


def test_a_setting_that_echo_does_not_support_stops_the_server_with_its_name(serve):
    config = resolve_config_path("echo")
    result = serve("--tokenizer-worker-num", "2", config=config)
    assert result.returncode != 0
    assert "echo-sgl: Echo does not support --tokenizer-worker-num > 1" in result.stderr


BROKEN = {
    "seams.version = lambda name: '0.5.99'": "SGLang 0.5.99 is installed, Echo knows 0.5.23",
    "seams.RELIED_ON += (seams.Seam(f'{seams._BATCH}.release_req', 'x'),)": (
        "sglang.srt.managers.schedule_batch.release_req takes"
    ),
    "HookRegistry._patched.add(seams.HOOKS[2].seam.target)": "did not apply the hook on sglang.srt",
}


@pytest.mark.parametrize("change", BROKEN, ids=["version", "signature", "not-applied"])
def test_an_engine_that_does_not_fit_stops_the_process(change, server_for):
    """What is found is changed before SGLang loads plugins, as another release would."""
    imports = f"from echo_sgl.engine import seams\n{change}\n"
    report = REPORT.replace("\nload_plugins()", f"\n{imports}load_plugins()")
    result = run("-c", report, config=resolve_config_path("echo"), zygote=server_for.zygote)
    assert result.returncode == 1
    assert result.stderr.rstrip().splitlines()[-1].startswith("echo-sgl: ")
    assert BROKEN[change] in result.stderr
    assert result.stdout == ""


def test_doctor_prints_the_same_check_without_a_server(server_for):
    good = run("-m", "echo_sgl.cli", "doctor", "--json", zygote=server_for.zygote)
    assert good.returncode == 0
    assert json.loads(good.stdout)["ok"] is True
    command = ("-m", "echo_sgl.cli", "doctor", "--config", "nope.toml")
    bad = run(*command, zygote=server_for.zygote, SGLANG_PLUGINS="other")
    assert bad.returncode == 1
    assert "SGLang would not load Echo" in " ".join(bad.stdout.split())
    assert "nope.toml cannot be read" in " ".join(bad.stdout.split())
