"""`echo-sgl batch`: work through a job file against a running server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from echo_sgl.cli.batch import service as batch_service

batch_app = typer.Typer(
    help="Work through job files in OpenAI's batch format.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
batch_app.command()(batch_service.submit)
batch_app.command("list")(batch_service.list_)
batch_app.command()(batch_service.status)
batch_app.command()(batch_service.watch)
batch_app.command()(batch_service.cancel)
batch_app.command()(batch_service.retry)
batch_app.command()(batch_service.pause)
batch_app.command()(batch_service.resume)
batch_app.command()(batch_service.results)


Jobs = Annotated[Path | None, typer.Argument(help="One request a line, as for OpenAI's batches.")]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "--output-file",
        "-o",
        help="Where answers go; also what a rerun resumes.  [required]",
    ),
]
InputFile = Annotated[Path | None, typer.Option("--input-file", "-i", help="The same as JOBS.")]
Urls = Annotated[
    list[str] | None,
    typer.Option(
        help="Where the server listens; several share the lines.  "
        f"[default: {batch_service.DEFAULT_URL}]",
        show_default=False,
    ),
]
Errors = Annotated[
    Path | None, typer.Option(help="Where failed lines go.  [default: OUTPUT.errors.jsonl]")
]
SkipInvalid = Annotated[
    bool, typer.Option("--skip-invalid", help="Carry on without lines that are not valid.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Throw away what an earlier run left in OUTPUT.")
]
Order = Annotated[
    Literal["prefix", "file"], typer.Option(help="Send lines that share a prefix together?")
]
Flex = Annotated[
    bool,
    typer.Option(
        "--flex/--no-flex",
        help='Mark lines as offline (service_tier "flex"); not for servers without Echo.',
    ),
]
Window = Annotated[int, typer.Option(help="Requests in each server at a time.", min=1)]
WindowTokens = Annotated[
    int, typer.Option(help="Estimated tokens in each server at a time.", min=1)
]
MaxRetries = Annotated[
    int, typer.Option(help="How often one line may break in a server (5xx).", min=0)
]
Direct = Annotated[
    bool,
    typer.Option(
        "--direct", help="Send the lines from here even to a server with a batch service."
    ),
]


@batch_app.callback()
def batch() -> None:
    """Work through job files in OpenAI's batch format.

    Example:

        echo-sgl batch run jobs.jsonl --url http://127.0.0.1:30000 --output out.jsonl
    """


@batch_app.command()
def run(  # noqa: PLR0913, PLR0917 - one parameter per option
    jobs: Jobs = None,
    output: Output = None,
    input_file: InputFile = None,
    url: Urls = None,
    errors: Errors = None,
    skip_invalid: SkipInvalid = False,
    overwrite: Overwrite = False,
    order: Order = "prefix",
    flex: Flex = True,
    window: Window = 64,
    window_tokens: WindowTokens = 1_000_000,
    max_retries: MaxRetries = 5,
    api_key: batch_service.Key = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    direct: Direct = False,
) -> None:
    """Answer every line of a job file exactly once; run it again to resume.

    Example:

        echo-sgl batch run jobs.jsonl --url http://127.0.0.1:30000 --output out.jsonl

    A server with a batch service gets the whole file and works on by itself; this command then
    only watches and fetches the results. To any other server the lines are sent from here, and
    so they are with several --url, --direct, --no-flex, --order file, --skip-invalid, or lines
    for several endpoints in one file.

    Several --url share the lines by ranges of the prefix order; what a server does not get done,
    because it is slow or dies, the others take over.

    All lines are checked before the first one is sent. A server that is away, restarts or is
    full (429, 503) is waited for. Exit code: 0 when every valid line is answered, 1 when lines
    failed (the error file says why), or the server's batch failed, expired or was cancelled, 2 for
    what you can mend, 130 when interrupted (run it again to resume).
    """
    from echo_sgl.cli.batch.hand_over import hand_over
    from echo_sgl.cli.batch.run import BatchRun, execute
    from echo_sgl.cli.batch.sender import SendOptions
    from echo_sgl.cli.url import server_roots

    plan = BatchRun(
        *_named_files(jobs, input_file, output),
        errors,
        urls=server_roots(url or [batch_service.DEFAULT_URL]),
        api_key=api_key,
        options=SendOptions(window, window_tokens, max_retries, is_flex=flex),
        skip_invalid=skip_invalid,
        overwrite=overwrite,
        in_prefix_order=order == "prefix",
        as_json=as_json,
    )
    must_send = direct or skip_invalid or order == "file" or not flex
    exit_code = None if must_send else hand_over(plan)
    raise typer.Exit(execute(plan) if exit_code is None else exit_code)


def _named_files(
    jobs: Path | None, input_file: Path | None, output: Path | None
) -> tuple[Path, Path]:
    """The job file, which has two names, and where answers go. Errors: `typer.BadParameter`."""
    if jobs is not None and input_file is not None:
        raise typer.BadParameter(
            f"name one job file, as JOBS or by -i; given are {jobs} and {input_file}"
        )
    jobs = jobs or input_file
    if jobs is None or output is None:
        raise typer.BadParameter("name the job file and where answers go: JOBS --output OUTPUT")
    return jobs, output
