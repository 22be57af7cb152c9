"""The command line itself: documented, light, and clear about mistakes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from echo_sgl.cli import app
from echo_sgl.cli.serve import check_port, sglang_script
from echo_sgl.cli.url import ServerUrlError, server_root
from echo_sgl.config import (
    CONFIG_ENV,
    DATABASE_URL_ENV,
    FORCE_PROFILE_ENV,
    KEYS_FILE_ENV,
    STATE_DIR_ENV,
)
from echo_sgl.errors import ConfigError
from tests.servers import ServerPool

COMMAND = (sys.executable, "-m", "echo_sgl.cli")


def run(*args: object, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, args)],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def commands(node: object, name: str = "echo-sgl") -> Iterator[tuple[str, str]]:
    """Full name and help of every command that does something."""
    children: dict[str, object] = getattr(node, "commands", {})
    for child_name, child in children.items():
        yield from commands(child, f"{name} {child_name}")
    if not children:
        yield name, str(getattr(node, "help", None) or "")


COMMANDS = dict(commands(get_command(app)))


def test_the_commands_are_the_known_ones() -> None:
    assert {"echo-sgl serve", "echo-sgl stats", "echo-sgl doctor", "echo-sgl batch run"} <= set(
        COMMANDS
    )
    actions = "submit list status watch cancel retry pause resume results"
    assert {f"echo-sgl batch {action}" for action in actions.split()} <= set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_documented_with_an_example_of_itself(name: str) -> None:
    text = COMMANDS[name]
    assert "Example" in text
    assert f"{name} " in text.partition("Example")[2]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_is_for(name: str) -> None:
    node = get_command(app)
    for part in name.split()[1:]:
        node = getattr(node, "commands")[part]  # noqa: B009 - not all click commands are groups
    undocumented = [item.name for item in node.params if not getattr(item, "help", None)]
    assert undocumented == []


def test_importing_the_command_line_imports_neither_torch_nor_sglang() -> None:
    code = "import sys, echo_sgl.cli; print(*(m for m in ('torch', 'sglang') if m in sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == ""


def test_a_missing_config_ends_with_code_2_and_names_the_presets() -> None:
    result = run("serve", "--config", "/nowhere/echo.toml", "--model-path", "x")
    assert result.returncode == 2
    assert "/nowhere/echo.toml cannot be read" in result.stderr
    assert "echo" in result.stderr
    assert result.stdout == ""


def test_a_bad_config_value_ends_with_code_2_and_the_allowed_range(tmp_path: Path) -> None:
    config = tmp_path / "bad.toml"
    config.write_text("[offline]\nutility_ratio = 7\n")
    result = run("serve", "--config", config, "--model-path", "x")
    assert result.returncode == 2
    assert "offline.utility_ratio is 7; allowed is 0.0 to 1.0" in result.stderr


def test_a_plugin_filter_that_leaves_echo_out_is_refused() -> None:
    result = run("serve", "--model-path", "x", SGLANG_PLUGINS="other")
    assert result.returncode == 2
    assert "add echo_sgl" in result.stderr


def test_serve_refuses_a_profile_that_cannot_be_read(tmp_path: Path) -> None:
    config = tmp_path / "echo.toml"
    config.write_text('[estimator]\nprofile = "/nowhere/profile.json"\n')
    result = run("serve", "--config", config, "--model-path", "x")
    assert result.returncode == 2
    assert "profile /nowhere/profile.json cannot be read: No such file" in result.stderr


def test_doctor_finds_a_profile_that_serve_would_refuse(
    tmp_path: Path, server_for: ServerPool
) -> None:
    config = tmp_path / "echo.toml"
    config.write_text('[estimator]\nprofile = "/nowhere/profile.json"\n')
    command = [*COMMAND, "doctor", "--config", str(config), "--json"]
    result = server_for.zygote.run(command, env=os.environ, timeout_s=120)
    assert result.returncode == 1
    [problem] = json.loads(result.stdout)["checks"]["config"]
    assert "profile /nowhere/profile.json cannot be read: No such file" in problem


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ("", "--calibrate writes the profile that the config names, but"),
        ("/nowhere/profile.json", "profile /nowhere/profile.json is in a folder that does not"),
        (__file__, "It is left as it is; choose another file"),
    ],
)
def test_serve_refuses_to_calibrate_without_a_place_for_the_profile(
    tmp_path: Path, profile: str, message: str
) -> None:
    config = tmp_path / "echo.toml"
    config.write_text(f'[estimator]\nprofile = "{profile}"\n')
    result = run("serve", "--config", config, "--calibrate", "--model-path", "x")
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.parametrize("given", ["--port {port}", "--host 127.0.0.1 --port={port}"])
def test_serve_refuses_a_port_that_is_taken_before_anything_is_loaded(given: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("serve", "--model-path", "x", *given.format(port=port).split())
    assert result.returncode == 2
    assert f"cannot listen on 127.0.0.1, port {port}" in result.stderr
    assert "another --port" in result.stderr


@pytest.mark.parametrize("arguments", [["--port", "0"], ["--port=many"], ["--port"]])
def test_a_port_that_is_free_or_sglangs_to_judge_is_let_through(arguments: list[str]) -> None:
    check_port(arguments)


def test_a_port_that_only_sglangs_config_names_is_not_looked_at() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        check_port(["--config", "own.yaml"], default_port=port)
        check_port(["--config=own.yaml"], default_port=port)
        with pytest.raises(ConfigError, match=f"port {port}.*another --port"):
            check_port([], default_port=port)


@pytest.fixture
def other_python(tmp_path: Path) -> Path:
    """A Python of its own folder that sees the same packages but has no `sglang` script."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True
    )
    return tmp_path / "venv" / "bin" / "python"


def serve_with(python: Path, *args: object) -> subprocess.CompletedProcess[str]:
    packages = [path for path in sys.path if path.endswith("site-packages")]
    root = str(Path(__file__).resolve().parents[2])
    return subprocess.run(
        [str(python), "-m", "echo_sgl.cli", "serve", *map(str, args)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([root, *packages])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_python_without_sglangs_command_says_how_to_get_it(other_python: Path) -> None:
    result = serve_with(other_python, "--model-path", "x")
    assert result.returncode == 1
    assert "pip install sglang" in result.stderr


def test_serve_becomes_sglangs_command_with_all_other_arguments(
    other_python: Path, tmp_path: Path
) -> None:
    script = other_python.with_name("sglang")
    script.write_text(
        "import os, sys\n"
        "assert os.getppid() == int(os.environ['TEST_PARENT'])\n"
        f"print(os.environ['{CONFIG_ENV}'], *sys.argv[1:], sep='|')\n"
    )
    config = tmp_path / "mine.toml"
    config.write_text("[offline]\nseed = 3\n")
    os.environ["TEST_PARENT"] = str(os.getpid())
    given = ["--model-path", "m", "--port", "0", "--enable-metrics", "--config", config, "-x=a b"]
    result = serve_with(other_python, *given, "--", "--config", "sglang.yaml")
    wanted = ["--model-path", "m", "--port", "0", "--enable-metrics", "-x=a b"]
    assert result.stdout.strip().split("|") == [
        str(config),
        "serve",
        *wanted,
        "--config",
        "sglang.yaml",
    ]


def test_sglangs_command_is_found_where_packages_of_the_system_put_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's Python is /usr/bin/python3, and commands go to /usr/local/bin or ~/.local/bin."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme=None: str(scripts))
    with pytest.raises(typer.Exit):
        sglang_script()
    (scripts / "sglang").touch()
    assert sglang_script() == scripts / "sglang"
    (tmp_path / "sglang").touch()
    assert sglang_script() == tmp_path / "sglang"


def test_serve_hands_the_batch_services_options_on(other_python: Path, tmp_path: Path) -> None:
    names = (STATE_DIR_ENV, DATABASE_URL_ENV, KEYS_FILE_ENV)
    script = other_python.with_name("sglang")
    script.write_text(f"import os\nprint(*(os.environ.get(name) for name in {names}), sep='|')\n")
    keys = tmp_path / "keys"
    keys.write_text("ann a-key-of-enough-letters\n")
    state = tmp_path / "state"
    given = ("--port", "0", "--echo-state-dir", state, "--echo-keys-file", keys)
    result = serve_with(other_python, *given)
    assert result.stdout.strip().split("|") == [str(state), "None", str(keys)]
    assert serve_with(other_python, "--port", "0").stdout.strip() == "None|None|None"


def test_serve_tells_the_server_to_take_a_profile_of_another_machine(other_python: Path) -> None:
    script = other_python.with_name("sglang")
    script.write_text(f"import os\nprint(os.environ.get('{FORCE_PROFILE_ENV}'))\n")
    assert serve_with(other_python, "--port", "0", "--force-profile").stdout.strip() == "1"
    assert serve_with(other_python, "--port", "0").stdout.strip() == "None"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--echo-keys-file", "keys"), "switch it on with --echo-state-dir"),
        (("--echo-database-url", "postgresql://h/d"), "switch it on with --echo-state-dir"),
        (("--echo-state-dir", "/dev/null/state"), "cannot be written"),
        (("--echo-state-dir", "s", "--echo-database-url", "x"), "not a URL of PostgreSQL"),
        (("--echo-state-dir", "s", "--echo-keys-file", "none"), "keys file none cannot be read"),
    ],
)
def test_serve_refuses_batch_options_that_do_not_work_before_the_server_starts(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("serve", *arguments, "--model-path", "m")
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    "given",
    ["http://h:30000", "http://h:30000/", "http://h:30000/v1", "http://h:30000/v1/"],
)
def test_a_url_is_taken_as_users_write_it(given: str) -> None:
    assert server_root(given) == "http://h:30000"


@pytest.mark.parametrize(
    "given", ["", "h:30000", "127.0.0.1:30000", "ftp://h", "http://", "http://h:x", "http://h:0"]
)
def test_a_url_that_reaches_nothing_is_refused_with_the_form_it_needs(given: str) -> None:
    with pytest.raises(ServerUrlError, match="http://HOST:PORT"):
        server_root(given)


@pytest.mark.parametrize(
    "host",
    ["xn--a", "a" * 64, "a..b", "\u00fc" * 70, "h\n", ".".join(["a" * 64] * 2)],
)
def test_a_host_that_no_name_can_be_is_refused_with_the_form_it_needs(host: str) -> None:
    with pytest.raises(ServerUrlError, match=r"is no name of a host.*http://HOST:PORT"):
        server_root(f"http://{host}:1")


@pytest.mark.parametrize(
    "host", ["h", "h.", "a_b", "\u00fc.example", "[::1]", "127.0.0.1", "a" * 63]
)
def test_a_host_that_a_name_can_be_is_taken(host: str) -> None:
    assert server_root(f"http://{host}:1") == f"http://{host}:1"


def test_a_command_without_its_arguments_ends_with_code_2() -> None:
    result = run("batch", "run", "jobs.jsonl")
    assert result.returncode == 2
    assert "--output" in result.stderr
