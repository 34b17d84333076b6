"""The documents a recipe names: reading them, and holding some out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roundpipe.cli.problems import UsageError
from roundpipe.cli.recipe import BUILTIN_PYTHON_REFERENCE, DataSection

Message = dict[str, str]

# Shorter paragraphs ("See also:", a line of a table) repeat without giving anything away.
_SHARED_PARAGRAPH_CHARS = 80


@dataclass(frozen=True)
class Document:
    """A text, or a chat: exactly one of ``text`` and ``messages`` is given.

    Attributes:
        name: a topic, or file and line; also decides whether the document is held out.
        text: plain text.
        messages: the turns of a chat, each with ``role`` and ``content``.
    """

    name: str
    text: str | None = None
    messages: tuple[Message, ...] | None = None


@dataclass(frozen=True)
class Corpus:
    """Documents to train on, documents to judge by, and a name for them."""

    train: list[Document]
    held_out: list[Document]
    label: str

    @property
    def is_chat(self) -> bool:
        """Whether any training document is a chat."""
        return any(document.messages is not None for document in self.train)


def read_corpus(data: DataSection) -> Corpus:
    """Read the documents of a recipe's ``data`` section and split them.

    The split depends on the documents' names only, so it stays the same over runs, seeds and
    machines. A single text is split near its end, between paragraphs.

    Raises:
        UsageError: a file is missing, empty or malformed (with its line), or nothing is left to
            train on or to hold out.
    """
    label = ", ".join(Path(s).name for s in data.source)
    documents = _read_all("source", data.source)
    if data.held_out_source is not None:
        return Corpus(documents, _read_all("held_out_source", data.held_out_source), label)
    if data.source == [BUILTIN_PYTHON_REFERENCE]:
        train, held_out = _split(documents, data.held_out)
        return Corpus(_without_shared(train, held_out), held_out, "Python language reference")
    if len(documents) == 1:
        train, held_out = _split_text(documents[0], data.held_out)
    else:
        train, held_out = _split(documents, data.held_out)
    return Corpus(train, held_out, label)


def _read_all(key: str, sources: Sequence[str]) -> list[Document]:
    try:
        return [document for source in sources for document in _read(source)]
    except UsageError as error:
        raise UsageError(f"data.{key}: {error}") from None


def _read(source: str) -> list[Document]:
    if source == BUILTIN_PYTHON_REFERENCE:
        return _python_reference()
    if source.startswith("builtin:"):
        raise _unusable(source, f"the only built-in data are {BUILTIN_PYTHON_REFERENCE}")
    path = Path(source).expanduser()
    if not path.is_file():
        kind = "a folder; name its files" if path.is_dir() else "there is no such file"
        raise _unusable(source, kind)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(source, f"cannot be read as UTF-8 text: {error}") from None
    if path.suffix == ".jsonl":
        documents = list(_json_lines(source, text))
    else:
        documents = [Document(source, text=text)] if text.strip() else []
    if not documents:
        raise _unusable(source, "the file is empty")
    return documents


def _python_reference() -> list[Document]:
    """The topics of the Python language reference that come with every CPython, by name."""
    from pydoc_data.topics import topics

    by_text: dict[str, str] = {}
    for name, text in sorted(topics.items()):
        # Some topics are the same page under two names.
        by_text.setdefault(text, name)
    return [Document(name, text=text) for text, name in by_text.items()]


def _json_lines(source: str, text: str) -> Iterator[Document]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        place = f"{source}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise _unusable(place, f"not a line of JSON: {error.msg}") from None
        if isinstance(row, dict) and isinstance(row.get("text"), str):
            if row["text"].strip():
                yield Document(place, text=row["text"])
        elif isinstance(row, dict) and "messages" in row:
            yield Document(place, messages=_messages(place, row["messages"]))
        else:
            found = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
            raise _unusable(
                place, f'expected {{"text": "..."}} or {{"messages": [...]}}, found {found}'
            )


def _messages(place: str, rows: Any) -> tuple[Message, ...]:
    if not isinstance(rows, list) or not rows:
        raise _unusable(place, '"messages" must be a list with at least one message')
    for index, row in enumerate(rows):
        if not isinstance(row, dict) or not all(
            isinstance(row.get(key), str) for key in ("role", "content")
        ):
            raise _unusable(place, f'messages[{index}] needs a text "role" and a text "content"')
    if not any(row["role"] == "assistant" for row in rows):
        raise _unusable(place, "no message has the role assistant, so there is nothing to learn")
    return tuple({"role": row["role"], "content": row["content"]} for row in rows)


def _split(documents: Sequence[Document], share: float) -> tuple[list[Document], list[Document]]:
    count = min(max(1, round(len(documents) * share)), len(documents) - 1)
    chosen = set(sorted(_hash(document) for document in documents)[:count])
    train = [document for document in documents if _hash(document) not in chosen]
    return train, [document for document in documents if _hash(document) in chosen]


def _hash(document: Document) -> str:
    # Python's own hash() differs from process to process.
    return hashlib.sha256(document.name.encode()).hexdigest()


def _split_text(document: Document, share: float) -> tuple[list[Document], list[Document]]:
    text = document.text
    if text is None:
        raise UsageError(
            f"data.source: {document.name} is the only chat; give more, or data.held_out_source"
        )
    cut = round(len(text) * (1 - share))
    paragraph = text.rfind("\n\n", 0, cut)
    cut = paragraph + 2 if paragraph > 0 else cut
    parts = replace(document, text=text[:cut]), replace(document, text=text[cut:])
    return [parts[0]], [parts[1]]


def _without_shared(train: list[Document], held_out: list[Document]) -> list[Document]:
    """Training texts without the paragraphs that the held-out ones contain too.

    Topics overlap: ``compound`` repeats the whole of ``with``, for one.
    """
    secret = {
        paragraph.strip()
        for document in held_out
        for paragraph in (document.text or "").split("\n\n")
        if len(paragraph.strip()) >= _SHARED_PARAGRAPH_CHARS
    }
    return [replace(document, text=_drop(document.text or "", secret)) for document in train]


def _drop(text: str, paragraphs: set[str]) -> str:
    return "\n\n".join(p for p in text.split("\n\n") if p.strip() not in paragraphs)


def _unusable(source: str, reason: str) -> UsageError:
    return UsageError(f"{source}: {reason}")
