"""SGLang's entry point into Echo. Off unless `ECHO_SGL_CONFIG` names a config file.

Off means: no hook registered and nothing of the engine imported.
"""

from __future__ import annotations

import os

from echo_sgl.config import CONFIG_ENV


def register() -> None:
    """Called by SGLang in the launcher, in every scheduler and in the detokenizer."""
    if not os.environ.get(CONFIG_ENV):
        return
    try:
        from echo_sgl.engine.install import install

        install()
    except Exception as error:
        # SGLang would log this and serve on without Echo; SystemExit it does not catch.
        raise SystemExit(
            f"echo-sgl: cannot be switched on: {type(error).__name__}: {error}"
        ) from error
