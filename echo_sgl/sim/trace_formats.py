"""How files of requests name what a simulation needs: the formats of public traces, and our own."""

from __future__ import annotations

from dataclasses import dataclass

from echo_sgl.sim.workload import BLOCK_TOKENS

MOONCAKE_BLOCK_TOKENS, BAILIAN_BLOCK_TOKENS = 512, 16


@dataclass(frozen=True, slots=True)
class Format:
    """How a kind of file names what is needed, and what else it may hold.

    `unit_s`: seconds of one unit of its time where that is a number, not a date. `mark`: a column
    that tells it from a format whose other names are the same.
    """

    name: str
    time: str
    prompt: str
    output: str
    others: tuple[str, ...] = ()
    unit_s: float = 1.0
    block_tokens: int = BLOCK_TOKENS
    blocks: str = ""
    mark: str = ""

    @property
    def needed(self) -> tuple[str, ...]:
        return self.time, self.prompt, self.output, *filter(None, [self.mark])

    @property
    def columns(self) -> tuple[str, ...]:
        """All that a file may hold."""
        return *self.needed, *self.others


CSV_FORMATS = (
    # Images are among the tokens of a context.
    Format("Azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens", ("NumImages",)),
    Format(
        "BurstGPT",
        "Timestamp",
        "Request tokens",
        "Response tokens",
        ("Model", "Total tokens", "Log Type", "Session ID", "Elapsed time"),
    ),
    Format(
        "SplitWise",
        "arrival_timestamp",
        "prompt_size",
        "token_size",
        ("request_id", "request_type", "application_id", "batch_size"),
    ),
    Format("Vidur", "arrived_at", "num_prefill_tokens", "num_decode_tokens"),
    Format("plain", "t_s", "context_tokens", "generated_tokens"),
)
RECORDING = Format(
    "recording",
    "at_s",
    "prompt_tokens",
    "output_tokens",
    ("class", "cached_tokens", "blocks"),
    blocks="blocks",
)
JSON_FORMATS = (
    # Mooncake's names, but seconds and shorter blocks.
    Format(
        "Qwen-Bailian",
        "timestamp",
        "input_length",
        "output_length",
        ("parent_chat_id", "type", "turn", "hash_ids"),
        block_tokens=BAILIAN_BLOCK_TOKENS,
        blocks="hash_ids",
        mark="chat_id",
    ),
    Format(
        "Mooncake",
        "timestamp",
        "input_length",
        "output_length",
        ("hash_ids",),
        unit_s=1e-3,
        block_tokens=MOONCAKE_BLOCK_TOKENS,
        blocks="hash_ids",
    ),
    RECORDING,
)


def known_formats() -> str:
    """All of them with what they need, for a message."""
    forms = (*CSV_FORMATS, *JSON_FORMATS)
    return "; ".join(f"{form.name} ({', '.join(form.needed)})" for form in forms)
