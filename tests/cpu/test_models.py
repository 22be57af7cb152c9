"""The demo models: what other tests assume of them."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from eval.servers.models import demo_model, find_model, python_sources


def test_two_processes_that_build_at_once_get_one_whole_model(tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        built = [pool.submit(demo_model, "tiny", tmp_path) for _ in range(2)]
    assert built[0].result() == built[1].result()
    assert [path.name for path in tmp_path.iterdir()] == [built[0].result().name]
    assert AutoConfig.from_pretrained(built[0].result()).num_hidden_layers == 2


def test_equal_parameters_give_equal_weights_without_a_word(
    tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    weights = [
        folder / "model.safetensors" for folder in (tiny_model, demo_model("tiny", tmp_path))
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert capfd.readouterr() == ("", ""), "the demo begins with its own first line"


def test_the_tokenizer_keeps_python_sources_and_saves_space(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    text = next(iter(python_sources())).read_text(encoding="utf-8")[:10_000]
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert len(tokens) < len(text) / 2.5


def test_the_chat_template_ends_where_the_assistant_begins(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt == "<|user|>hi<|end|><|assistant|>"


def test_an_unknown_size_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="allowed are tiny, small, base, large"):
        demo_model("huge")


def test_a_shape_is_a_config_and_a_tokenizer_without_weights(tmp_path: Path) -> None:
    folder, load_args = find_model("llama-3-8b", tmp_path)
    assert load_args == ("--load-format", "dummy")
    assert not list(Path(folder).glob("*.safetensors"))
    config = AutoConfig.from_pretrained(folder)
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (32, 4096, 128_256)
    assert max(AutoTokenizer.from_pretrained(folder).get_vocab().values()) < config.vocab_size
    assert find_model("some/model", tmp_path) == ("some/model", ())
