"""Results appear as a whole, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from roundpipe.cli.problems import UsageError
from roundpipe.cli.run_folder import METRICS_FILE, RECIPE_FILE, RunFolder


def fill(folder: Path, content: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in (RECIPE_FILE, METRICS_FILE, f"only-{content}"):
        (folder / name).write_text(content)


def run(target: Path, content: str, overwrite: bool = False) -> None:
    with RunFolder(target, overwrite) as folder:
        fill(folder.path, content)
        folder.commit()


def content(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_the_folder_appears_complete_with_its_parents(tmp_path: Path) -> None:
    target = tmp_path / "runs" / "a"
    with RunFolder(target, overwrite=False) as folder:
        fill(folder.path, "new")
        assert not target.exists()
        folder.commit()
    assert set(content(target).values()) == {"new"}
    assert [path.name for path in target.parent.iterdir()] == ["a"]


def test_an_empty_folder_may_be_there_already(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    run(tmp_path / "a", "new")
    assert set(content(tmp_path / "a").values()) == {"new"}


def test_an_earlier_run_is_replaced_only_when_asked_for_and_then_whole(tmp_path: Path) -> None:
    target = tmp_path / "a"
    run(target, "old")
    with pytest.raises(UsageError, match=r"holds an earlier run; --set output\.overwrite=true, or"):
        run(target, "new")
    assert set(content(target).values()) == {"old"}
    run(target, "new", overwrite=True)
    assert set(content(target).values()) == {"new"}
    assert "only-old" not in content(target)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError])
def test_what_is_interrupted_leaves_nothing_and_the_earlier_run_as_it_was(
    tmp_path: Path, failure: type[BaseException]
) -> None:
    target = tmp_path / "a"
    run(target, "old")

    def interrupted() -> None:
        with RunFolder(target, overwrite=True) as folder:
            fill(folder.path, "new")
            raise failure

    with pytest.raises(failure):
        interrupted()
    assert set(content(target).values()) == {"old"}
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_failed_exchange_puts_the_earlier_run_back(tmp_path: Path) -> None:
    target = tmp_path / "a"
    run(target, "old")
    with RunFolder(target, overwrite=True) as folder:
        folder.path.rmdir()  # now there is nothing to put in the earlier run's place
        with pytest.raises(FileNotFoundError):
            folder.commit()
    assert set(content(target).values()) == {"old"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_other_peoples_files_are_never_replaced(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.tex").write_text("years of work")
    (tmp_path / "b").write_text("a file")
    with pytest.raises(UsageError, match=r"output\.folder: .*a is not empty, and not an earlier"):
        RunFolder(tmp_path / "a", overwrite)
    with pytest.raises(UsageError, match="b is a file; choose another folder"):
        RunFolder(tmp_path / "b", overwrite)
    with pytest.raises(UsageError, match="cannot be created"):
        RunFolder(tmp_path / "b" / "c", overwrite).__enter__()
