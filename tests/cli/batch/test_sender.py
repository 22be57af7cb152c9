"""What a batch run keeps in a server that it sends lines to itself."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import httpx

from echo_sgl.batches.lines.job_file import LineReader, check_job_file
from echo_sgl.batches.lines.journal import Journal, JournalPaths
from echo_sgl.cli.batch.sender import Sender, SendOptions
from echo_sgl.cli.batch.tally import Display, Tally
from echo_sgl.cli.connection import Connection
from eval.servers.stub_server import StubModel, create_plain_app
from tests.cli.jobs import completion_line, write_job


def test_a_line_that_asks_for_several_answers_takes_as_many_places(tmp_path: Path) -> None:
    lines = [completion_line(f"{index}", f"p {index}", n=2) for index in range(20)]
    path = write_job(tmp_path / "jobs.jsonl", lines)

    async def main() -> int:
        model = StubModel(0.01)
        transport = httpx.ASGITransport(create_plain_app(model))
        client = httpx.AsyncClient(transport=transport, base_url="http://stub")
        rng, job = random.Random(0), check_job_file(path)
        display = Display(Tally(job.num_lines))
        connection = Connection(client, say=display.say, rng=rng)
        journal = Journal(JournalPaths.beside(tmp_path / "out.jsonl"), job.sha256)
        options, reader = SendOptions(window=5), LineReader(path)
        await Sender([connection], reader, journal, options=options, display=display, rng=rng).run(
            job.entries
        )
        journal.close()
        reader.close()
        assert display.tally.ok == 20
        return model.max_running

    assert asyncio.run(main()) == 2
