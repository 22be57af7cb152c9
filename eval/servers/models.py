"""Build Llama models on this machine: random weights, a tokenizer of Python sources.

Small ones are written out. Of a large one there is the shape only: SGLang makes up its weights
as it starts, which take the same time to compute with.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.paths import MODELS_DIR

SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DUMMY_WEIGHTS = ("--load-format", "dummy")
_MAX_TRAINING_BYTES = 4_000_000
_MAX_TOKENIZER_VOCAB = 6144
_RECIPE = 1  # part of the cache key: count up when the code below builds something else


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a model is built from; equal values give equal weights."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int = 6144
    max_position_embeddings: int = 16_384
    seed: int = 0


SIZES = {
    "tiny": ModelSize(64, 192, 2, 4, 2),
    "small": ModelSize(256, 704, 4, 8, 4),
    "base": ModelSize(384, 1024, 6, 6, 2),
    "large": ModelSize(512, 1408, 8, 8, 2),
}


# Llama 3 8B; its 16 GB of weights are never on disk.
SHAPES = {"llama-3-8b": ModelSize(4096, 14_336, 32, 32, 8, vocab_size=128_256)}


def find_model(name: str, models_dir: Path = MODELS_DIR) -> tuple[str, tuple[str, ...]]:
    """Folder of a demo model or a shape, anything else as it is; and its server's arguments."""
    if name in SHAPES:
        return str(_built(name, SHAPES[name], models_dir, has_weights=False)), DUMMY_WEIGHTS
    return (str(demo_model(name, models_dir)) if name in SIZES else name), ()


def demo_model(size: str = "base", models_dir: Path = MODELS_DIR) -> Path:
    """Folder of the model of that size; built in seconds when it is not there yet."""
    if size not in SIZES:
        raise ValueError(f"model size is {size!r}; allowed are {', '.join(SIZES)}")
    return _built(size, SIZES[size], models_dir, has_weights=True)


def _built(name: str, size: ModelSize, models_dir: Path, *, has_weights: bool) -> Path:
    """Two processes may ask at once: each builds in a folder of its own, the first rename wins."""
    folder = models_dir / f"{name}-{_digest(size)}"
    if folder.exists():
        return folder
    models_dir.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=models_dir))
    try:
        _save_tokenizer(size, scratch)
        if has_weights:
            _save_weights(size, scratch)
        else:
            _llama_config(size, architectures=["LlamaForCausalLM"]).save_pretrained(scratch)
        _move(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def python_sources() -> Iterator[Path]:
    """Source files of the running Python's standard library, always in the same order."""
    yield from sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def _digest(size: ModelSize) -> str:
    recipe = json.dumps([_RECIPE, dataclasses.asdict(size), CHAT_TEMPLATE, SPECIAL_TOKENS])
    return hashlib.sha256(recipe.encode()).hexdigest()[:10]


def _move(scratch: Path, folder: Path) -> None:
    try:
        os.rename(scratch, folder)
    except OSError:
        if not folder.exists():  # otherwise another process was first, with equal content
            raise


def _save_tokenizer(size: ModelSize, folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=min(size.vocab_size, _MAX_TOKENIZER_VOCAB),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_texts(), trainer)
    pad, end, *_ = SPECIAL_TOKENS
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        eos_token=end,
        model_max_length=size.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def _training_texts() -> Iterator[str]:
    left_bytes = _MAX_TRAINING_BYTES
    for source in python_sources():
        text = source.read_text(encoding="utf-8", errors="replace")
        left_bytes -= len(text)
        if left_bytes < 0:
            return
        yield text


def _llama_config(size: ModelSize, **changes: Any) -> Any:
    from transformers import LlamaConfig

    shape = dataclasses.asdict(size)
    del shape["seed"]
    return LlamaConfig(
        **shape,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=SPECIAL_TOKENS.index("<|end|>"),
        tie_word_embeddings=False,
        **changes,
    )


def _save_weights(size: ModelSize, folder: Path) -> None:
    import torch
    from transformers import LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # one file, written in a moment
    model = LlamaForCausalLM(_llama_config(size))
    generator = torch.Generator().manual_seed(size.seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            _fill(name, weight, generator)
        # No special token is ever the likeliest, so an answer has the length that was asked for.
        model.lm_head.weight[: len(SPECIAL_TOKENS)] = 0.0
    model.save_pretrained(folder)


def _fill(name: str, weight: Any, generator: Any) -> None:
    """Random weights under which far tokens matter: attention peaks instead of averaging.

    With the usual std of 0.02 the answer hardly depends on the prompt, and no comparison
    of outputs could show a wrong attention.
    """
    if weight.dim() == 1:
        weight.fill_(1.0)
        return
    std = 1.0 if "embed_tokens" in name else 1 / math.sqrt(weight.shape[1])
    if any(part in name for part in ("q_proj", "k_proj", "lm_head")):
        std *= 2
    weight.normal_(0.0, std, generator=generator)
