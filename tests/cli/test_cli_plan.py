"""``roundpipe plan`` and ``roundpipe simulate``, through the console entry point."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from roundpipe.cli import main
from roundpipe.plan.published import published_model, published_names

COSTS: dict[str, Any] = {
    "name": "toy",
    "layers": [
        *[{"forward_ms": 2.0, "backward_ms": 4.0, "weight_bytes": 1 << 30}] * 6,
        {"forward_ms": 9.0, "backward_ms": 18.0, "weight_bytes": 1 << 30},
    ],
    "machine": {"devices": 3, "hop_ms": 0.1},
    "microbatches": 6,
    "mode": "async",
}


@pytest.fixture
def costs_file(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(COSTS), encoding="utf-8")
    return path


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_plan_of_a_published_model_as_json(
    mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shown(capsys, "plan", "--published", "Qwen3-1.7B", "--mode", mode, "--json")
    document = json.loads(out)
    assert list(document) == [
        "forward", "backward", "replicas", "microbatches_per_round", "bubble_pct", "makespan_ms",
    ]  # fmt: skip
    forward, backward = document["forward"], document["backward"]
    assert [layer for stage in forward for layer in range(*stage)] == list(range(28))
    assert sorted(layer for stage in backward for layer in range(*stage)) == list(range(29))
    assert backward[0] == [28, 29]
    assert len(document["replicas"]) == len(forward) + len(backward)
    assert document["bubble_pct"] <= (8.5 if mode == "sync" else 0.5)


def test_a_costs_file_gives_plan_account_and_timeline(
    costs_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shown(capsys, "plan", costs_file)
    assert "toy: 7 layers, 3 devices, 6 microbatches, async" in out
    assert "where the devices' time goes:" in out
    assert out.count("device:") == 3
    assert "|FF" in out


def test_numbers_of_the_file_can_be_overridden(
    costs_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shown(
        capsys, "plan", costs_file, "--mode", "sync", "--devices", 2, "--microbatches", 4,
        "--memory", 8,
    )  # fmt: skip
    assert "toy: 7 layers, 2 devices, 4 microbatches, sync" in out
    assert out.count("device:") == 2


def test_pictures_traces_and_the_plan_are_written(
    costs_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    names = ("timeline.png", "account.png", "trace.json", "plan.json")
    timeline, account, trace, plan = (tmp_path / name for name in names)
    shown(
        capsys, "plan", costs_file, "--picture", timeline, "--account", account, "--trace", trace,
        "--save", plan,
    )  # fmt: skip
    assert timeline.read_bytes().startswith(b"\x89PNG")
    assert account.read_bytes().startswith(b"\x89PNG")
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]

    out = shown(capsys, "simulate", costs_file, "--plan", plan, "--iterations", 3, "--json")

    document = json.loads(out)
    assert len(document["iteration_ends_ms"]) == 3
    assert sum(document["bubble_account_pct"].values()) == pytest.approx(100)


@pytest.mark.parametrize("name", published_names())
def test_a_published_partition_is_simulated_to_its_published_time(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shown(capsys, "simulate", "--published", name, "--early-head", "--json")
    assert json.loads(out)["makespan_ms"] == pytest.approx(
        published_model(name).makespan_ms, abs=5e-4
    )


def test_a_simulation_is_shown_as_text(
    costs_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shown(capsys, "simulate", costs_file, "--iterations", 2)
    assert out.startswith("toy: 2 iterations (async) in ")
    assert "busy" in out
    assert out.count("device:") == 3


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_a_file_that_is_not_there(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, command, "no/such/costs.json")
    assert message == (
        "error: no/such/costs.json: No such file or directory; give the path of a file that can be "
        "read, or of one that can be written\n"
    )


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_a_published_model_that_is_misspelt(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(capsys, command, "--published", "Qwen3-1.7")
    assert "no published model is called 'Qwen3-1.7'; expected one of Qwen3-1.7B, " in message


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_nothing_to_plan_or_two_things(
    command: str, costs_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "neither of COSTS and --published given; expected one" in refused(capsys, command)
    both = refused(capsys, command, costs_file, "--published", "Qwen3-1.7B")
    assert "both of COSTS and --published given; expected one" in both


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--picture", "timeline.doc"], "expected a name that ends in one of .png, .svg, .pdf"),
        (["--devices", "0"], "--devices is 0; expected at least 1"),
        (["--microbatches", "-1"], "--microbatches is -1; expected at least 1"),
        (["--memory", "0"], "--memory is 0.0; expected GiB above 0"),
        (["--memory", "0.5"], "bytes on device:0"),  # names the layer and the bytes
    ],
)
def test_numbers_and_names_that_make_no_sense(
    arguments: list[str], message: str, costs_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, "plan", costs_file, *arguments)


def test_a_plan_of_another_model(
    costs_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"forward": [[0, 2]], "backward": [[2, 4], [0, 2]]}', encoding="utf-8")
    message = refused(capsys, "simulate", costs_file, "--plan", plan)
    assert "bwd_plan lacks layer 4; expected each of the layers 0..6 once" in message
    plan.write_text('{"forward": [3], "backward": []}', encoding="utf-8")
    assert "forward[0] is 3; expected [first, last + 1]" in refused(
        capsys, "simulate", costs_file, "--plan", plan
    )


def test_the_commands_need_nothing_that_a_plain_install_lacks() -> None:
    program = (
        "import sys\n"
        "for name in ('pydantic', 'rich', 'yaml', 'transformers', 'matplotlib'):\n"
        "    sys.modules[name] = None\n"
        "from roundpipe.cli import main\n"
        "raise SystemExit(main(['plan', '--published', 'Qwen3-32B', '--json']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["backward"]


def test_a_costs_file_is_no_plan(costs_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "simulate", costs_file, "--plan", costs_file)
    assert "costs.json is a costs file; expected a plan, as roundpipe plan COSTS --save" in message


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_layers_that_take_no_time(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "zero.json"
    path.write_text('{"layers": [{"forward_ms": 0}, {"forward_ms": 0.0}]}', encoding="utf-8")
    assert "zero.json take 0 ms; expected the times" in refused(capsys, command, path)


def test_a_reader_that_has_seen_enough_is_no_error(costs_file: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "roundpipe.cli", "plan", str(costs_file)],
        stdout=writer, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
