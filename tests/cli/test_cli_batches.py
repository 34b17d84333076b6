"""Documents as batches of token ids."""

from __future__ import annotations

from itertools import islice, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.tiny import make_tokenizer
from roundpipe.cli.batches import (
    IGNORED_LABEL,
    Example,
    collate,
    encode,
    evaluation_batches,
    pad_token_id,
    training_batches,
)
from roundpipe.cli.documents import Document
from roundpipe.cli.problems import UsageError

CHAT = (
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no"},
)


def numbered(count: int) -> list[Example]:
    """Examples of two tokens, the first of which is the example's number."""
    rows = [torch.tensor([number, 0]) for number in range(count)]
    return [Example(row, row) for row in rows]


def learned_text(example: Example, tokenizer: Any) -> str:
    return str(tokenizer.decode(example.labels[example.labels != IGNORED_LABEL]))


@settings(deadline=None, max_examples=30)
@given(
    lines=st.lists(st.text("ab cd", min_size=1, max_size=30), min_size=1, max_size=5),
    length=st.integers(2, 12),
)
def test_texts_are_cut_into_sequences_and_only_an_unusable_tail_is_lost(
    lines: list[str], length: int
) -> None:
    tokenizer = make_tokenizer()
    documents = [Document(str(number), text=line) for number, line in enumerate(lines)]
    examples = encode(documents, tokenizer, length)
    stream = [token for e in examples for token in e.input_ids.tolist()]
    whole = "".join(f"{line}<|end|>" for line in lines)
    decoded = tokenizer.decode(stream)
    assert whole.startswith(decoded)
    # A single last token predicts nothing.
    assert len(tokenizer(whole).input_ids) - len(stream) <= 1
    assert all(len(e.input_ids) == length for e in examples[:-1])
    assert all(torch.equal(e.input_ids, e.labels) for e in examples)


def test_only_the_assistants_words_are_learned(tokenizer: Any) -> None:
    (example,) = encode([Document("a", messages=CHAT)], tokenizer, 100)
    assert tokenizer.decode(example.input_ids) == (
        "<user>hi<|end|><assistant>hello<|end|><user>more<|end|><assistant>no<|end|>"
    )
    assert learned_text(example, tokenizer) == "hello<|end|>no<|end|>"


def test_a_long_chat_is_cut_at_its_end(tokenizer: Any) -> None:
    whole = "<user>hi<|end|><assistant>hel"
    length = len(tokenizer(whole).input_ids)
    (example,) = encode([Document("a", messages=CHAT)], tokenizer, length)
    assert tokenizer.decode(example.input_ids) == whole
    assert learned_text(example, tokenizer) == "hel"


def test_a_chat_whose_answer_is_cut_off_is_left_out(tokenizer: Any) -> None:
    documents = [Document("a", messages=CHAT), Document("b", text="abc")]
    (example,) = encode(documents, tokenizer, 8)
    assert tokenizer.decode(example.input_ids) == "abc<|end|>"
    with pytest.raises(UsageError, match=r"data\.sequence_length: nothing to learn is left in 1"):
        encode(documents[:1], tokenizer, 8)


def test_a_chat_needs_a_chat_template() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(UsageError, match="x:1 is a chat, but the model's tokenizer has no chat"):
        encode([Document("x:1", messages=CHAT)], tokenizer, 100)


def test_a_template_that_rewrites_history_is_refused_rather_than_mislabelled() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if loop.last %}!{% endif %}{{ m['content'] }}{% endfor %}"
    )
    with pytest.raises(UsageError, match="x:1: the tokenizer's chat template rewrites earlier"):
        encode([Document("x:1", messages=CHAT)], tokenizer, 100)


def test_shorter_examples_are_padded_masked_and_not_learned() -> None:
    long, short = torch.tensor([5, 6, 7, 8]), torch.tensor([9, 10])
    batch = collate([Example(long, long), Example(short, torch.tensor([-100, 10]))], pad_id=3)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8], [9, 10, 3, 3]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch.labels.tolist() == [[5, 6, 7, 8], [-100, 10, -100, -100]]
    assert (batch.num_tokens, batch.num_predicted) == (6, 4)


@given(count=st.integers(1, 12), size=st.integers(1, 7), seed=st.integers(0, 2**31))
def test_every_pass_trains_on_every_example_once_in_full_batches(
    count: int, size: int, seed: int
) -> None:
    batches = list(islice(training_batches(numbered(count), size, 0, seed), 2 * count))
    assert {len(batch.input_ids) for batch in batches} == {size}
    order = torch.cat([batch.input_ids[:, 0] for batch in batches]).tolist()
    for start in range(0, len(order) - count + 1, count):
        assert sorted(order[start : start + count]) == list(range(count))


def test_the_seed_decides_the_order() -> None:
    def order(seed: int) -> list[int]:
        first = next(training_batches(numbered(50), 50, 0, seed))
        return first.input_ids[:, 0].tolist()

    assert order(1) == order(1)
    assert order(1) != order(2)


@given(count=st.integers(1, 40), size=st.integers(1, 7), limit=st.integers(1, 50))
def test_evaluation_takes_a_fixed_even_choice(count: int, size: int, limit: int) -> None:
    batches = evaluation_batches(numbered(count), size, 0, limit)
    chosen = torch.cat([batch.input_ids[:, 0] for batch in batches]).tolist()
    assert len(chosen) == min(count, limit)
    assert chosen == sorted(set(chosen))
    gaps = [after - before for before, after in pairwise(chosen)]
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert all(len(batch.input_ids) == size for batch in batches[:-1])


def test_padding_falls_back_to_another_id() -> None:
    tokenizer = make_tokenizer()
    assert pad_token_id(tokenizer) == tokenizer.eos_token_id
    tokenizer.pad_token = "a"
    assert pad_token_id(tokenizer) == tokenizer.convert_tokens_to_ids("a")
    tokenizer.pad_token = tokenizer.eos_token = None
    assert pad_token_id(tokenizer) == 0
