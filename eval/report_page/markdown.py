"""The Markdown that our own summaries use, as HTML: nothing more of it, and all text escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

_CODE_SPAN = re.compile(r"`([^`]*)`")
_ITALIC = re.compile(r"(?<![\w*])\*([^*\s](?:[^*]*[^*\s])?)\*(?![\w*])")
_RULE = re.compile(r"[|\s:-]*-[|\s:-]*")


def to_html(text: str, *, heading: int = 3) -> str:
    """Headings, indented commands, lists, tables and paragraphs.

    The text's first level of headings becomes `<h{heading}>`.
    """
    return "\n".join(_block(lines, heading) for lines in _blocks(text))


def _blocks(text: str) -> Iterator[list[str]]:
    """Lines that belong together: blank lines part them."""
    block: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.strip():
            block.append(line)
        elif block:
            yield block
            block = []


def _block(lines: list[str], heading: int) -> str:
    first = lines[0]
    if first.startswith("#"):
        level = len(first) - len(first.lstrip("#"))
        size = min(6, heading + level - 1)
        title = f"<h{size}>{_inline(first.lstrip('# '))}</h{size}>"
        return "\n".join([title, *([_block(lines[1:], heading)] if lines[1:] else [])])
    if all(line.startswith("    ") for line in lines):
        code = "\n".join(line[4:] for line in lines)
        return f"<pre>{html.escape(code)}</pre>"
    if first.startswith("- ") and all(line.startswith(("- ", "  ")) for line in lines):
        items = "".join(f"<li>{_inline(item)}</li>" for item in _items(lines))
        return f"<ul>{items}</ul>"
    if first.startswith("|"):
        return _table(lines)
    return f"<p>{_inline(' '.join(lines))}</p>"


def _items(lines: list[str]) -> list[str]:
    """The points of a list; indented lines go on with the one before."""
    items: list[str] = []
    for line in lines:
        if line.startswith("- "):
            items.append(line[2:])
        else:
            items[-1] += f" {line.strip()}"
    return items


def _table(lines: list[str]) -> str:
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
    has_head = len(lines) > 1 and _RULE.fullmatch(lines[1]) is not None
    body = rows[2:] if has_head else rows
    head = _row(rows[0], "th") if has_head else ""
    return f"<table>{head}{''.join(_row(row, 'td') for row in body)}</table>"


def _row(cells: list[str], tag: str) -> str:
    shown = "".join(f"<{tag}{_align(cell)}>{_inline(cell)}</{tag}>" for cell in cells)
    return f"<tr>{shown}</tr>"


def _align(cell: str) -> str:
    """Figures stand to the right."""
    return ' class="n"' if re.match(r"[-+]?\d|-$", cell) else ""


def _inline(text: str) -> str:
    escaped = html.escape(text)
    parts = _CODE_SPAN.split(escaped)
    shown = [
        f"<code>{part}</code>" if number % 2 else _ITALIC.sub(r"<em>\1</em>", part)
        for number, part in enumerate(parts)
    ]
    return "".join(shown)
