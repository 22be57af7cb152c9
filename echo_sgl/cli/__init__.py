"""The `echo-sgl` command: one file per command group.

Importing it must stay light: a command imports what it needs when it runs, so that
`echo-sgl --help` and the step before `sglang serve` do not pay for torch.
"""

from __future__ import annotations

import sys

import typer

from echo_sgl.cli.batch.commands import batch_app
from echo_sgl.cli.doctor import doctor
from echo_sgl.cli.planning.plan import plan
from echo_sgl.cli.serve import serve
from echo_sgl.cli.tuning.budget import budget
from echo_sgl.cli.tuning.calibrate import calibrate
from echo_sgl.cli.watching.explain import explain
from echo_sgl.cli.watching.record import record
from echo_sgl.cli.watching.stats import stats
from echo_sgl.cli.watching.step_trace import trace
from echo_sgl.cli.watching.steps import steps_app
from echo_sgl.cli.watching.top import top
from echo_sgl.errors import EchoError

USER_ERROR_EXIT = 2

app = typer.Typer(
    name="echo-sgl",
    help="Run offline batch jobs on a stock SGLang server without its online users noticing.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)
app.command()(doctor)
app.command()(stats)
app.command()(top)
app.command()(explain)
app.command()(trace)
app.command()(calibrate)
app.command()(budget)
app.command()(plan)
app.command()(record)
app.add_typer(batch_app, name="batch")
app.add_typer(steps_app, name="steps")


def main() -> None:
    """Run the command line; an error that the user can mend ends with exit code 2."""
    try:
        app()
    except EchoError as error:
        print(f"echo-sgl: {error}", file=sys.stderr)
        sys.exit(USER_ERROR_EXIT)
