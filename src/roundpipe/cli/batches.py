"""From documents to batches of token ids, with the positions that count for the loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roundpipe.cli.documents import Document, Message
from roundpipe.cli.problems import UsageError

IGNORED_LABEL = -100


@dataclass(frozen=True)
class Example:
    """One sequence: token ids and labels, both of shape (length,), int64.

    A label is the token itself, or ``IGNORED_LABEL`` where the loss does not look.
    """

    input_ids: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Batch:
    """Sequences of one step, padded on the right to the longest of them.

    Attributes:
        input_ids: token ids, shape (batch, length), int64.
        attention_mask: 1 for a token, 0 for padding, same shape, int64.
        labels: token ids or ``IGNORED_LABEL``, same shape, int64; not shifted, the model does that.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor

    @property
    def num_predicted(self) -> int:
        """How many tokens the loss is taken over; the first of a sequence is never predicted."""
        return int((self.labels[:, 1:] != IGNORED_LABEL).sum())

    @property
    def num_tokens(self) -> int:
        """How many tokens the batch holds, without padding."""
        return int(self.attention_mask.sum())


def encode(documents: Sequence[Document], tokenizer: Any, sequence_length: int) -> list[Example]:
    """Turn documents into examples of at most ``sequence_length`` tokens.

    Texts are joined, with the end-of-text token after each, and cut into equal sequences. A chat is
    one sequence, cut at its end if it is too long; only what the assistant says is learned.

    Raises:
        UsageError: a chat cannot be encoded, or nothing to learn is left.
    """
    examples = _pack(documents, tokenizer, sequence_length)
    for document in documents:
        if document.messages is not None:
            examples.append(_encode_chat(document, document.messages, tokenizer, sequence_length))
    learnable = [e for e in examples if bool((e.labels[1:] != IGNORED_LABEL).any())]
    if not learnable:
        raise UsageError(
            f"data.sequence_length: nothing to learn is left in {len(documents)} documents cut to "
            f"{sequence_length} tokens; give longer sequences or more data"
        )
    return learnable


def collate(examples: Sequence[Example], pad_id: int) -> Batch:
    """Put examples together, padded on the right to the longest."""
    length = max(len(example.input_ids) for example in examples)
    shape = (len(examples), length)
    input_ids = torch.full(shape, pad_id)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, IGNORED_LABEL)
    for row, example in enumerate(examples):
        end = len(example.input_ids)
        input_ids[row, :end] = example.input_ids
        attention_mask[row, :end] = 1
        labels[row, :end] = example.labels
    return Batch(input_ids, attention_mask, labels)


def training_batches(
    examples: Sequence[Example], batch_size: int, pad_id: int, seed: int
) -> Iterator[Batch]:
    """Batches without end: each pass over the examples in a new order that ``seed`` decides.

    Every batch is full; one that the end of a pass leaves short goes on with the next pass.
    """
    order = _endless_order(len(examples), seed)
    while True:
        yield collate([examples[next(order)] for _ in range(batch_size)], pad_id)


def evaluation_batches(
    examples: Sequence[Example], batch_size: int, pad_id: int, limit: int
) -> list[Batch]:
    """Batches of at most ``limit`` examples, spread evenly over all of them; always the same."""
    count = min(limit, len(examples))
    chosen = [examples[i * len(examples) // count] for i in range(count)]
    return [
        collate(chosen[start : start + batch_size], pad_id) for start in range(0, count, batch_size)
    ]


def pad_token_id(tokenizer: Any) -> int:
    """An id to fill up with; any will do, since padding is masked."""
    for name in ("pad_token_id", "eos_token_id"):
        token_id = getattr(tokenizer, name, None)
        if token_id is not None:
            return int(token_id)
    return 0


def _endless_order(count: int, seed: int) -> Iterator[int]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator).tolist()


def _pack(documents: Sequence[Document], tokenizer: Any, sequence_length: int) -> list[Example]:
    stream: list[int] = []
    end = tokenizer.eos_token_id
    for document in documents:
        if document.text is not None:
            stream += tokenizer(document.text, verbose=False).input_ids
            if end is not None and stream[-1:] != [end]:
                stream.append(end)
    pieces = torch.tensor(stream, dtype=torch.int64).split(sequence_length)
    return [Example(piece, piece) for piece in pieces]


def _encode_chat(
    document: Document, messages: tuple[Message, ...], tokenizer: Any, sequence_length: int
) -> Example:
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(
            f"data.source: {document.name} is a chat, but the model's tokenizer has no chat "
            'template; give {"text": ...} lines or an instruction-tuned model'
        )
    text = _render(tokenizer, messages)
    learned = list(_assistant_spans(document, messages, tokenizer, text))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    input_ids = torch.tensor(encoded.input_ids[:sequence_length], dtype=torch.int64)
    labels = torch.full_like(input_ids, IGNORED_LABEL)
    for index, (start, _) in enumerate(encoded.offset_mapping[:sequence_length]):
        if any(first <= start < end for first, end in learned):
            labels[index] = input_ids[index]
    return Example(input_ids, labels)


def _assistant_spans(
    document: Document, messages: tuple[Message, ...], tokenizer: Any, text: str
) -> Iterator[tuple[int, int]]:
    """Where in ``text`` the assistant speaks: from after its prompt to the end of its turn."""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(tokenizer, messages[:index], add_generation_prompt=True)
        after = _render(tokenizer, messages[: index + 1])
        if not (text.startswith(after) and after.startswith(before)):
            raise UsageError(
                f"data.source: {document.name}: the tokenizer's chat template rewrites earlier "
                "turns, so the assistant's words cannot be told apart; give one turn per line"
            )
        yield len(before), len(after)


def _render(tokenizer: Any, messages: Sequence[Message], **options: bool) -> str:
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
