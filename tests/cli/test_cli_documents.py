"""Reading documents, and keeping some of them out of training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roundpipe.cli.documents import Corpus, read_corpus
from roundpipe.cli.problems import UsageError
from roundpipe.cli.recipe import DataSection

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def write_lines(path: Path, rows: list[object]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    return str(path)


def read(*sources: str, **options: object) -> Corpus:
    return read_corpus(DataSection.model_validate({"source": list(sources), **options}))


def texts(corpus: Corpus) -> tuple[set[str | None], set[str | None]]:
    return {d.text for d in corpus.train}, {d.text for d in corpus.held_out}


def test_the_python_reference_is_split_by_topic_and_nothing_leaks() -> None:
    corpus = read_corpus(DataSection())
    assert corpus.label == "Python language reference"
    train, held_out = {d.name for d in corpus.train}, {d.name for d in corpus.held_out}
    assert len(held_out) >= 5
    assert len(train) >= 50
    assert not train & held_out
    trained_on = "\n\n".join(d.text or "" for d in corpus.train)
    for document in corpus.held_out:
        for paragraph in (document.text or "").split("\n\n"):
            # One of the topics, "compound", is a chapter that several others are sections of.
            assert len(paragraph.strip()) < 80 or paragraph.strip() not in trained_on


def test_the_python_reference_is_split_the_same_way_every_time() -> None:
    assert read_corpus(DataSection()) == read_corpus(DataSection())


def test_lines_of_texts_are_split_without_loss_and_by_name_only(tmp_path: Path) -> None:
    first = write_lines(tmp_path / "a.jsonl", [{"text": f"text {i}"} for i in range(20)])
    corpus = read(first, held_out=0.25)
    train, held_out = texts(corpus)
    assert (len(train), len(held_out)) == (15, 5)
    assert train | held_out == {f"text {i}" for i in range(20)}
    # Other words in the same places: the same places are held out.
    write_lines(tmp_path / "a.jsonl", [{"text": f"other {i}"} for i in range(20)])
    again = read(first, held_out=0.25)
    assert [d.name for d in again.held_out] == [d.name for d in corpus.held_out]


def test_at_least_one_document_is_trained_on_and_one_held_out(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    for share in (0.01, 0.99):
        corpus = read(source, held_out=share)
        assert (len(corpus.train), len(corpus.held_out)) == (1, 1)


def test_held_out_data_of_their_own(tmp_path: Path) -> None:
    train = write_lines(tmp_path / "train.jsonl", [{"text": "one"}, {"text": "two"}])
    held_out = write_lines(tmp_path / "test.jsonl", [{"text": "three"}])
    corpus = read(train, held_out_source=held_out)
    assert texts(corpus) == ({"one", "two"}, {"three"})


def test_a_single_text_is_cut_between_paragraphs(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    text = "\n\n".join(f"paragraph number {i}" for i in range(10))
    path.write_text(text, encoding="utf-8")
    corpus = read(str(path), held_out=0.2)
    (train,), (held_out,) = corpus.train, corpus.held_out
    assert train.text is not None
    assert held_out.text is not None
    assert train.text + held_out.text == text
    assert held_out.text.startswith("paragraph number 7")
    assert corpus.label == "book.txt"


def test_chats_keep_their_messages_and_are_told_from_texts(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"messages": CHAT}, {"messages": CHAT}])
    corpus = read(source)
    assert corpus.is_chat
    assert corpus.train[0].messages == tuple(CHAT)
    assert not read(write_lines(tmp_path / "b.jsonl", [{"text": "a"}, {"text": "b"}])).is_chat


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "not a line of JSON"),
        ("[1]", 'expected {"text": "..."} or {"messages": [...]}, found list'),
        ('{"prompt": 1, "answer": 2}', '{"messages": [...]}, found prompt, answer'),
        ('{"text": 3}', '{"messages": [...]}, found text'),
        ('{"messages": []}', '"messages" must be a list with at least one message'),
        ('{"messages": [{"role": "user"}]}', 'messages[0] needs a text "role" and a text'),
        (
            '{"messages": [{"role": "user", "content": "a"}]}',
            "no message has the role assistant, so there is nothing to learn",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: str, said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "good"}}\n\n{row}\n', encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        read(str(path))
    assert str(caught.value).startswith(f"data.source: {path}:3: ")
    assert said in str(caught.value)


def test_files_that_hold_no_data(tmp_path: Path) -> None:
    def said(*sources: str, **options: object) -> str:
        with pytest.raises(UsageError) as caught:
            read(*sources, **options)
        return str(caught.value)

    empty, latin = tmp_path / "empty.txt", tmp_path / "latin.txt"
    empty.write_text(" \n")
    latin.write_bytes(b"\xe9t\xe9")
    gone = f"{tmp_path}/gone.txt"
    assert said(gone) == f"data.source: {gone}: there is no such file"
    assert said(str(tmp_path)) == f"data.source: {tmp_path}: a folder; name its files"
    assert said(str(empty)) == f"data.source: {empty}: the file is empty"
    assert "cannot be read as UTF-8 text" in said(str(latin))
    assert said("builtin:x") == (
        "data.source: builtin:x: the only built-in data are builtin:python-reference"
    )
    assert said("builtin:python-reference", held_out_source=gone) == (
        f"data.held_out_source: {gone}: there is no such file"
    )


def test_one_chat_cannot_be_split(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"messages": CHAT}])
    with pytest.raises(UsageError, match=r"is the only chat; give more, or data\.held_out_source"):
        read(source)
