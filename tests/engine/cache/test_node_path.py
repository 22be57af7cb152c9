"""The tokens on the way to a node, without the tree."""

from __future__ import annotations

from array import array
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from echo_sgl.engine.cache.node_path import NodePath
from echo_sgl.engine.cache.plain_node import PlainNode

tokens = st.lists(st.integers(0, 9), min_size=1, max_size=5)
bounds = st.none() | st.integers(0, 40)


def chain_of(parts: list[list[int]]) -> UnifiedTreeNode:
    node = PlainNode()
    for part in parts:
        child = PlainNode()
        child.parent, child.key = node, RadixKey(array("q", part))
        node = child
    return node


@given(st.lists(tokens, max_size=8), bounds, bounds)
def test_a_path_reads_as_its_tokens_in_one_array(parts, start, stop):
    path, whole = NodePath(chain_of(parts)), array("q", chain.from_iterable(parts))
    assert len(path) == len(whole)
    assert list(path) == list(whole)
    assert path[start:stop] == whole[start:stop]


@pytest.mark.parametrize("index", [-1, 3, 100])
def test_a_token_beyond_either_end_is_refused(index):
    with pytest.raises(IndexError, match=f"token {index} of a path of 3"):
        NodePath(chain_of([[1, 2], [3]]))[index]
