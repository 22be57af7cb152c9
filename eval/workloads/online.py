"""Online traffic from any file that the experiments know."""

from __future__ import annotations

from pathlib import Path

from eval.workloads import WorkloadError
from eval.workloads.clients import client_trace, is_clients, read_clients
from eval.workloads.conversations import conversation_trace
from eval.workloads.sessions import find_reader, read_sessions
from eval.workloads.traces import Arrival, read_trace


def read_online(path: Path, *, seed: int = 0) -> list[Arrival]:
    """The requests of a trace in any format that `echo-sgl plan` reads, of a service's clients, or
    of conversations.

    `seed`: of what the file does not tell: times and lengths of clients; the order of conversations
    and their times.
    Errors: `WorkloadError` names the file, the line, the key and the bad value.
    """
    if is_clients(path):
        return client_trace(read_clients(path), seed=seed)
    if (reader := find_reader(path)) is None:
        return read_trace(path)
    sessions = [calls for _, calls in read_sessions(reader, path) if calls]
    if not sessions:
        raise WorkloadError(f"{path} holds no call of a conversation")
    return conversation_trace(sessions, seed=seed)
