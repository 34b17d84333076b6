"""Each of the six waits of a streaming pipeline, left out, is reported; with it, nothing is."""

from contextlib import AbstractContextManager
from typing import get_args

import pytest
import torch

from support import fakeacc
from support.fakeacc.streaming import Omission, StreamingPipeline, plain_step

LAYERS = 6
WIDTH = 16
OMISSIONS: tuple[Omission, ...] = get_args(Omission)
# In milliseconds: of every kernel, of every copy, and of either at random.
LATENCIES = {
    "none": (0.0, 0.0, 0.0),
    "slow copies": (0.0, 2.0, 0.0),
    "slow kernels": (0.5, 0.0, 0.0),
    "jitter": (0.0, 0.0, 1.0),
}
# What a report must name: the operation that came too early, and what it did not wait for.
CULPRITS = {
    "weight, forward": ("aten::mm", "the upload"),
    "free slot": ("the upload", "aten::mm"),
    "weight, backward": ("aten::mm", "the upload"),
    "gradient": ("the download", "aten::mm"),
    "record_stream": ("the free", "the download"),
    "host": ("aten::cat", "the download"),
}


def slowed(name: str) -> AbstractContextManager[None]:
    kernel_ms, copy_ms, jitter_ms = LATENCIES[name]
    return fakeacc.latency(kernel_ms=kernel_ms, copy_ms=copy_ms, jitter_ms=jitter_ms)


@pytest.fixture
def problem() -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH, generator=generator) / 4 for _ in range(LAYERS)]
    return weights, torch.randn(8, WIDTH, generator=generator)


@pytest.mark.parametrize("latency", LATENCIES)
def test_the_whole_pipeline_is_right_and_clean(
    problem: tuple[list[torch.Tensor], torch.Tensor], latency: str
) -> None:
    expected = plain_step(*problem)
    with slowed(latency):
        pipeline = StreamingPipeline(problem[0])
        for _ in range(2):
            torch.testing.assert_close(pipeline.step(problem[1]), expected)
    fakeacc.drain()
    assert fakeacc.reports() == []


@pytest.mark.parametrize("latency", LATENCIES)
@pytest.mark.parametrize("omission", OMISSIONS)
def test_a_planted_omission_is_reported_and_its_corrected_twin_is_not(
    problem: tuple[list[torch.Tensor], torch.Tensor], omission: Omission, latency: str
) -> None:
    weights, x = problem
    with slowed(latency):
        StreamingPipeline(weights, omission).step(x)
        fakeacc.drain()
        found = fakeacc.reports()
        fakeacc.clear_reports()
        operation, other = CULPRITS[omission]
        assert [
            report
            for report in found
            if report.operation.startswith(operation) and report.other.startswith(other)
        ], [str(report) for report in found]
        StreamingPipeline(weights).step(x)
        fakeacc.drain()
    assert fakeacc.reports() == []


def test_the_reports_do_not_depend_on_the_threads(
    problem: tuple[list[torch.Tensor], torch.Tensor],
) -> None:
    """One omission, many timings, one list of reports: what no comparison of results can give."""
    seen = set()
    for seed in range(6):
        fakeacc.drain()
        with fakeacc.latency(jitter_ms=0.5 * (seed % 3), seed=seed):
            StreamingPipeline(problem[0], "gradient").step(problem[1])
        fakeacc.drain()
        seen.add(tuple((report.operation, report.other) for report in fakeacc.reports()))
        fakeacc.clear_reports()
    (only,) = seen
    assert len(only) >= LAYERS
