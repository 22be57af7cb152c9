"""`echo-sgl serve --calibrate`: the server that comes up is measured by a child of its launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from echo_sgl.config import CALIBRATE_ENV
from echo_sgl.engine.settings import active_config


def start_calibration(server_args: Any) -> subprocess.Popen[bytes] | None:
    """Start `echo-sgl calibrate` beside the launcher, if `ECHO_SGL_CALIBRATE_S` asks for it.

    It stores the model that the config names, in whose place the profile is used. It waits until
    the server answers, and ends when the launcher does. The API key goes by the environment:
    every user of the machine sees arguments.
    """
    seconds = os.environ.get(CALIBRATE_ENV)
    if not seconds:
        return None
    estimator = active_config().estimator
    options = {
        "--url": server_args.url(),
        "--output": estimator.profile,
        "--model": estimator.model,
        "--seconds": seconds,
    }
    arguments = [part for option in options.items() for part in option]
    env = os.environ | {"ECHO_SGL_API_KEY": server_args.api_key or ""}
    return subprocess.Popen(
        [sys.executable, "-m", "echo_sgl.cli", "calibrate", "--wait", *arguments], env=env
    )
