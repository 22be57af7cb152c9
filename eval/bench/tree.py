"""The tree core's operations: Echo's against SGLang's Python and Rust cores, side by side.

Ours runs with its dearest order (next-use) and 10,000 pending requests to look at; the stock
cores have no such knowledge to keep. The cores take turns of some rounds each, there and back, so
that all see the same machine; medians. In a turn a core finds its own tree in the CPU's caches,
which a model's forward pass would have emptied: how long an eviction takes then is a row apart.
"""

from __future__ import annotations

import gc
import multiprocessing
import random
import statistics
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from echo_sgl.config import CacheConfig
from eval.servers.machine import machine, peak_bytes

LEAVES = (1_000, 10_000, 100_000)
NUM_DOCUMENTS = 100
DOCUMENT_TOKENS = 1_900
QUESTION_TOKENS = 20
NUM_PENDING = 10_000
REPEATS, TURN = 200, 20
# The Python core rebuilds a heap of all leaves: a third of a second a call at 100,000.
SLOW_REPEATS = 5
COLD_REPEATS = 40
# More than any CPU's caches hold.
SWEPT_BYTES = 256 * 1024**2

Timings = dict[str, dict[str, list[float]]]


def run() -> list[dict[str, Any]]:
    """Rows for `make bench`: each operation at each tree size, against both stock cores."""
    _prepare_sglang()
    rows = _memory_rows()
    for num_leaves in LEAVES:
        trees = [_Tree(name, num_leaves) for name in ("echo", "rust", "python")]
        pool = _attach_pool(trees[0])
        timings: Timings = defaultdict(lambda: defaultdict(list))
        for turn in range(REPEATS // TURN):
            for tree in trees if turn % 2 else trees[::-1]:
                is_slow = tree.name == "python" and num_leaves == max(LEAVES)
                tree.take_turn(turn, timings, SLOW_REPEATS if is_slow else REPEATS)
        rows += _rows(timings, num_leaves, ("rust", "python"))
        rows += _rows(_cold_timings(trees[:2]), num_leaves, ("rust",))
        rows.append(_reorder_row(trees[0], pool, num_leaves))
    return rows


class _Tree:
    """One core filled with documents and questions about them."""

    def __init__(self, name: str, num_leaves: int) -> None:
        self.name, self.random = name, random.Random(0)
        self.documents = [self.tokens(DOCUMENT_TOKENS) for _ in range(NUM_DOCUMENTS)]
        self.values = _arange(DOCUMENT_TOKENS + QUESTION_TOKENS)
        gc.collect()
        before_bytes = peak_bytes()
        self.core = _create_core(name)
        for number in range(num_leaves):
            self.insert(self.question(number))
        gc.collect()
        # Trees only grow here, so the peak is what they took.
        self.bytes_per_leaf = (peak_bytes() - before_bytes) / num_leaves

    def tokens(self, count: int) -> array[int]:
        return array("q", (self.random.randrange(32_000) for _ in range(count)))

    def question(self, number: int) -> array[int]:
        document = self.documents[number % NUM_DOCUMENTS]
        return document + array("q", [100_000 + number]) + self.tokens(QUESTION_TOKENS - 1)

    def insert(self, tokens: array[int]) -> Any:
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        params = InsertParams(key=RadixKey(tokens), value=self.values[: len(tokens)])
        step = self.core.begin_insert(params)
        assert step.result is not None
        return step.result.last_device_node

    def match(self, tokens: Sequence[int]) -> Any:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return self.core.match_prefix(MatchPrefixParams(key=RadixKey(tokens))).last_device_node

    def take_turn(self, turn: int, timings: Timings, num_repeats: int) -> None:
        """Some of each operation, on prompts that nobody used before.

        Evictions by themselves: where one walks over all leaves, what comes next starts cold.
        """
        repeats = range(turn * TURN, min((turn + 1) * TURN, num_repeats))
        for repeat in repeats:
            self.measure_use(self.question(1_000_000 + repeat), timings)
        for repeat in repeats:
            self.insert(self.question(3_000_000 + repeat))
            with _timed(timings, "evict one leaf", self.name):
                self.evict_one()

    def measure_use(self, question: array[int], timings: Timings) -> None:
        with _timed(timings, "match + insert of 1,920 tokens", self.name):
            self.match(question)
            node = self.insert(question)
        with _timed(timings, "lock + unlock", self.name):
            lock = self.core.inc_lock_ref(node)
            self.core.dec_lock_ref(node, lock.to_dec_params())
        with _timed(timings, "split", self.name):
            self.match(question[: DOCUMENT_TOKENS + QUESTION_TOKENS // 2])

    def evict_one(self) -> None:
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        self.core.evict_device_start(ComponentType.FULL, 1)
        victim = self.core.evict_device_next_node(ComponentType.FULL, {}).node_id
        result = self.core.evict_device_leaf(victim, False)
        self.core.evict_device_end(ComponentType.FULL)
        result.device_frees.clear()
        result.cache_actions.clear()


def _cold_timings(trees: Sequence[_Tree]) -> Timings:
    """Evictions that find nothing of the tree or the code in the CPU's caches."""
    timings: Timings = defaultdict(lambda: defaultdict(list))
    swept = bytearray(SWEPT_BYTES)
    for repeat in range(COLD_REPEATS):
        for tree in trees:
            tree.insert(tree.question(4_000_000 + repeat))
            swept[:] = bytes(SWEPT_BYTES)
            with _timed(timings, "evict one leaf with cold caches", tree.name):
                tree.evict_one()
    return timings


class _timed:
    """Append the microseconds of a block to `timings[operation][core]`."""

    def __init__(self, timings: Timings, operation: str, core: str) -> None:
        self._into = timings[operation][core]

    def __enter__(self) -> None:
        self._start_s = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._into.append((time.perf_counter() - self._start_s) * 1e6)


def _attach_pool(tree: _Tree) -> Any:
    from echo_sgl.engine.pool.offline_pool import OfflinePool
    from echo_sgl.policies.order.offline_order import PsmOrder

    pool = OfflinePool(PsmOrder(), capacity=NUM_PENDING)
    tree.core.pending, pool.on_change = pool, tree.core.prompt_changed
    for number in range(NUM_PENDING):
        pool.add(_request(number, tree.question(2_000_000 + number)), entry_s=0.0, resumed=False)
    tree.core.settle_all()
    return pool


def _request(number: int, prompt: array[int]) -> Any:
    return SimpleNamespace(
        rid=f"{number:08d}",
        origin_input_ids=prompt,
        output_ids=array("q"),
        seqlen=len(prompt),
        extra_key=None,
        cache_salt=None,
    )


def _reorder_row(tree: _Tree, pool: Any, num_leaves: int) -> dict[str, Any]:
    """Every pending request leaves and comes anew, and each leaf it waited for moves."""
    pending = list(pool)

    def reorder() -> None:
        for req in pending:
            pool.remove(req.rid)
            del req.echo_sequence  # its place in line
            pool.add(req, entry_s=0.0, resumed=False)
        tree.core.settle_all()

    times_us = [_call_us(reorder) / len(pending) for _ in range(3)]
    name = f"reorder of {NUM_PENDING:,} pending, each, {num_leaves:,} leaves"
    return _row(name, statistics.median(times_us), None, "us", len(times_us))


def _memory_rows() -> list[dict[str, Any]]:
    """Each core in a process of its own: in memory that others freed, a tree would look small."""
    cores = ("echo", "rust")
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as fresh:
        measured = zip(*(fresh.apply(_bytes_per_leaf, (name,)) for name in cores), strict=True)
    return [
        _row(f"memory per leaf, {num_leaves:,} leaves", ours, rust, "bytes", 1)
        for num_leaves, (ours, rust) in zip(LEAVES, measured, strict=True)
    ]


def _bytes_per_leaf(name: str) -> list[float]:
    """Of a tree of each size, one beside the other."""
    _prepare_sglang()
    trees = [_Tree(name, num_leaves) for num_leaves in (1, *LEAVES)]
    return [tree.bytes_per_leaf for tree in trees[1:]]  # the first one loads what all use


def _rows(timings: Timings, num_leaves: int, stocks: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for operation, by_core in timings.items():
        ours = statistics.median(by_core["echo"])
        for stock in stocks:
            name = f"{operation}, {num_leaves:,} leaves, against {stock}"
            samples = by_core[stock]
            rows.append(_row(name, ours, statistics.median(samples), "us", len(samples)))
    return rows


def _row(name: str, ours: float, stock: float | None, unit: str, n: int) -> dict[str, Any]:
    return {
        "name": name,
        "ours": round(ours, 1),
        "stock": None if stock is None else round(stock, 1),
        "ratio": None if stock is None else round(ours / stock, 3),
        "unit": unit,
        "n": n,
        "machine": machine(),
    }


def _call_us(call: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    call()
    return (time.perf_counter() - start_s) * 1e6


def _arange(count: int) -> Any:
    import torch

    return torch.arange(count)


def _prepare_sglang() -> None:
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))


def _create_core(name: str) -> Any:
    """A core with no pool of KV behind it: the trees here hold more than any test machine."""
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_cache.tree_core_registry import (
        get_tree_core_factory,
        register_tree_core_backend,
    )
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    from echo_sgl.engine.cache.tree_core import EchoTreeCore

    if get_tree_core_factory("echo") is None:
        config = CacheConfig(order="next-use")
        register_tree_core_backend(
            "echo", lambda params, components: EchoTreeCore(params, components, config)
        )
    params = CacheInitParams(
        req_to_token_pool=None,
        token_to_kv_pool_allocator=None,
        page_size=1,
        disable=False,
        tree_components=(ComponentType.FULL,),
        tree_core_backend=name,
    )
    return UnifiedRadixCache(params).tree_core
