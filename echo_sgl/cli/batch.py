"""`echo-sgl batch`: work through a job file against a running server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

batch_app = typer.Typer(
    help="Work through job files in OpenAI's batch format.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@batch_app.callback()
def batch() -> None:
    """Work through job files in OpenAI's batch format.

    Example:

        echo-sgl batch run jobs.jsonl --url http://127.0.0.1:30000 --output out.jsonl
    """


@batch_app.command()
def run(  # noqa: PLR0913, PLR0917 - one parameter per option
    jobs: Annotated[Path, typer.Argument(help="One request a line, as for OpenAI's batches.")],
    output: Annotated[Path, typer.Option(help="Where answers go; also what a rerun resumes.")],
    url: Annotated[str, typer.Option(help="Where the server listens.")] = "http://127.0.0.1:30000",
    errors: Annotated[
        Path | None, typer.Option(help="Where failed lines go.  [default: OUTPUT.errors.jsonl]")
    ] = None,
    skip_invalid: Annotated[
        bool, typer.Option("--skip-invalid", help="Carry on without lines that are not valid.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Throw away what an earlier run left in OUTPUT.")
    ] = False,
    order: Annotated[
        Literal["prefix", "file"], typer.Option(help="Send lines that share a prefix together?")
    ] = "prefix",
    flex: Annotated[
        bool,
        typer.Option(
            "--flex/--no-flex",
            help='Mark lines as offline (service_tier "flex"); not for servers without Echo.',
        ),
    ] = True,
    window: Annotated[int, typer.Option(help="Requests in the server at a time.", min=1)] = 64,
    window_tokens: Annotated[
        int, typer.Option(help="Estimated tokens in the server at a time.", min=1)
    ] = 1_000_000,
    max_retries: Annotated[
        int, typer.Option(help="How often one line may break in the server (5xx).", min=0)
    ] = 5,
    api_key: Annotated[
        str | None,
        typer.Option(help="Sent as bearer token.", envvar=["ECHO_SGL_API_KEY", "OPENAI_API_KEY"]),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Answer every line of a job file exactly once; run it again to resume.

    Example:

        echo-sgl batch run jobs.jsonl --url http://127.0.0.1:30000 --output out.jsonl

    All lines are checked before the first one is sent. A server that is away, restarts or is
    full (429, 503) is waited for. Exit code: 0 when every valid line has its record (also one in
    the error file), 2 for what you can mend, 130 when interrupted (run it again to resume).
    """
    from echo_sgl.cli.batch_run import BatchRun, execute
    from echo_sgl.cli.sender import SendOptions
    from echo_sgl.cli.url import server_root

    options = SendOptions(window, window_tokens, max_retries, is_flex=flex)
    plan = BatchRun(
        jobs,
        output,
        errors,
        url=server_root(url),
        api_key=api_key,
        options=options,
        skip_invalid=skip_invalid,
        overwrite=overwrite,
        in_prefix_order=order == "prefix",
        as_json=as_json,
    )
    raise typer.Exit(execute(plan))
