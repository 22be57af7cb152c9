"""The demo's own job: questions about source files of the running Python's standard library."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass

from eval.servers.models import python_sources
from eval.workloads import WorkloadError
from eval.workloads.jobs import BatchLine, batch_line, shuffled
from eval.workloads.prompts import Tokenizer, count_tokens, cut_to_tokens

MIN_DOCUMENT_TOKENS, MAX_DOCUMENT_TOKENS = 1500, 3000
QUESTIONS = (
    "What does {name} return?",
    "Which errors can {name} raise, and when?",
    "Who calls {name}, and why?",
    "Explain {name} in one sentence.",
    "Write a test for {name}.",
)


@dataclass(frozen=True, slots=True)
class Document:
    """The start of one source file and the functions and classes that are defined in it."""

    name: str
    text: str
    defined_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StdlibJob:
    """How large the job is; equal values on equal Pythons give equal lines."""

    model: str
    num_documents: int = 16
    questions_per_document: int = 20
    answer_tokens: int = 16
    seed: int = 0

    def lines(self, tokenizer: Tokenizer) -> list[BatchLine]:
        """The job's lines, shuffled: as users send them, not as a cache would like them."""
        rng = random.Random(self.seed)
        documents = _documents(tokenizer, self.num_documents, self.questions_per_document, rng)
        lines = [
            self._line(f"{document.name}/{number}", document, question)
            for document in documents
            for number, question in enumerate(self._questions(document, rng))
        ]
        return shuffled(lines, self.seed)

    def _questions(self, document: Document, rng: random.Random) -> list[str]:
        every = [
            template.format(name=name) for template in QUESTIONS for name in document.defined_names
        ]
        return rng.sample(every, self.questions_per_document)

    def _line(self, custom_id: str, document: Document, question: str) -> BatchLine:
        prompt = f"# {document.name}\n{document.text}\n\n# Question: {question}\n# Answer:"
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": self.answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        return batch_line(custom_id, body)


def _documents(
    tokenizer: Tokenizer, num_documents: int, num_questions: int, rng: random.Random
) -> Iterator[Document]:
    sources = list(python_sources())
    rng.shuffle(sources)
    found = 0
    for source in sources:
        if found == num_documents:
            return
        text = source.read_text(encoding="utf-8", errors="replace")
        max_tokens = rng.randint(MIN_DOCUMENT_TOKENS, MAX_DOCUMENT_TOKENS)
        document = _document(tokenizer, source.name, text, max_tokens)
        if document and len(document.defined_names) * len(QUESTIONS) >= num_questions:
            found += 1
            yield document
    if found < num_documents:
        raise WorkloadError(
            f"{num_documents} documents were asked for; this Python's library has {found} "
            f"long enough with {num_questions} questions each; ask for fewer of either"
        )


def _document(tokenizer: Tokenizer, name: str, source: str, max_tokens: int) -> Document | None:
    """The file cut to `max_tokens`, or None when it is too short to be one."""
    text = cut_to_tokens(tokenizer, source, max_tokens)
    if count_tokens(tokenizer, text) < MIN_DOCUMENT_TOKENS:
        return None
    return Document(name, text, defined_names(source, end_line=text.count("\n")))


def defined_names(source: str, *, end_line: int) -> tuple[str, ...]:
    """Functions, methods and classes that are defined in the first `end_line` lines, in order."""
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    nodes = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, definitions) and node.lineno <= end_line
    ]
    return tuple(dict.fromkeys(node.name for node in sorted(nodes, key=lambda node: node.lineno)))
