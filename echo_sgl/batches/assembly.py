"""Put the batch service on an ASGI app: its routes, and a dispatcher that lives as long as it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from echo_sgl.batches.dispatch.dispatcher import Dispatcher
from echo_sgl.batches.dispatch.line_engine import LineEngine
from echo_sgl.batches.dispatch.metrics import JobMetrics
from echo_sgl.batches.dispatch.progress import LateProgress
from echo_sgl.batches.http.api import batch_router
from echo_sgl.batches.http.service import BatchService
from echo_sgl.batches.http.tenants import Tenants
from echo_sgl.batches.store.job_store import JobStore
from echo_sgl.config import BatchesConfig

logger = logging.getLogger(__name__)


def add_batch_service(
    app: FastAPI,
    store: JobStore,
    config: BatchesConfig,
    engine: LineEngine,
    tenants: Tenants,
    *,
    with_metrics: bool = False,
) -> LateProgress:
    """Add the routes now, and work on batches while the app's lifespan runs.

    `with_metrics` shows the jobs in the process's Prometheus registry.
    """
    progress = LateProgress(engine)
    service = BatchService(store, config, progress)
    threads = ThreadPoolExecutor(8, "echo-batch-api")
    app.include_router(batch_router(service, tenants, threads))
    lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def with_dispatcher(the_app: Any) -> AsyncIterator[Any]:
        async with lifespan(the_app) as state:
            metrics = JobMetrics.create(enabled=with_metrics)
            dispatcher = progress.dispatcher = Dispatcher(store, config, engine, metrics)
            dispatcher.start()
            try:
                yield state
            finally:
                await dispatcher.stop()
                threads.shutdown(wait=False, cancel_futures=True)
                store.close()
                logger.info("the batch service has stopped; unfinished lines are kept")

    app.router.lifespan_context = with_dispatcher
    return progress
