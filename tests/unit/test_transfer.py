"""Values between stages, and weights going up in pieces."""

from __future__ import annotations

import pytest
import torch

from roundpipe.devices import CheckedPool, CpuChecks, open_cpu_pool
from roundpipe.devices.base import Category, Device, Stream
from roundpipe.transfer import CHUNK_BYTES, Border, ChunkedUpload, Origin, Value, download
from support.backends import run_on
from support.faults import InjectedError, watched_pool

X = torch.arange(4.0)


def computed(device: Device, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as something that the device's compute stream made."""
    made = device.empty(tensor, Stream.COMPUTE, Category.ACTIVATIONS)
    with device.compute_scope():
        made.copy_(tensor)
    return made


def test_a_value_goes_up_once_and_comes_home_as_it_was() -> None:
    with watched_pool(1) as pool:
        (device,) = pool.devices

        def there_and_back() -> torch.Tensor:
            value = Value(X)
            value.send(device)
            value.send(device)
            assert value.on(device)
            with device.compute_scope():
                doubled = value.fetch(device) * 2
            assert not value.on(device)  # whoever fetched it owns the copy
            result = Value()
            result.bring_home(device, doubled, "1 (layer 3)")
            assert result.origin == Origin("1 (layer 3)", "cpu:0")
            return result.home()

        assert run_on(pool, 0, there_and_back).result().tolist() == [0.0, 2.0, 4.0, 6.0]


def test_another_devices_upload_waits_for_the_download_that_fills_the_host_copy() -> None:
    with watched_pool(2) as pool:
        first, second = pool.devices
        value = Value()
        with pool.hold(Stream.OUTWARD, 0) as hold:
            run_on(pool, 0, lambda: value.bring_home(first, computed(first, X), "0")).result()
            hold.wait_reached()
            run_on(pool, 1, lambda: value.send(second)).result()
            future = run_on(pool, 1, lambda: value.fetch(second).clone())
            hold.release()
            assert torch.equal(future.result(), X)


def test_a_copy_on_its_way_home_is_not_handed_out_to_be_overwritten() -> None:
    with watched_pool(1) as pool:
        (device,) = pool.devices
        value = Value()

        def leave() -> None:
            made = computed(device, X)
            value.bring_home(device, made, "0")
            value.keep(device, made)

        def overwrite() -> None:
            with device.compute_scope():
                value.fetch(device).zero_()

        with pool.hold(Stream.OUTWARD) as hold:
            run_on(pool, 0, leave).result()
            hold.wait_reached()
            overwritten = run_on(pool, 0, overwrite)
            hold.release()
            overwritten.result()
        assert torch.equal(value.home(), X)


def test_a_value_that_is_nowhere_says_so() -> None:
    with open_cpu_pool(1) as pool:
        value = Value(X)
        value.drop_host()
        assert not value.has_host
        with pytest.raises(RuntimeError, match="asked for after its last copy was dropped"):
            value.send(pool.devices[0])
        with pytest.raises(RuntimeError, match="a value that never came home was asked for"):
            value.home()
        assert not value.failed_on_the_way_home()


def test_a_download_that_failed_is_told_from_a_value_that_is_missing() -> None:
    with open_cpu_pool(1, CpuChecks()) as pool:
        (device,) = pool.devices
        error = InjectedError("on the way")
        pool.fail_copy(error, Stream.OUTWARD)
        value = Value()
        run_on(pool, 0, lambda: value.bring_home(device, computed(device, X), "0")).result()
        with pytest.raises(InjectedError) as caught:
            value.home()
        assert caught.value is error
        assert value.failed_on_the_way_home()


def test_where_device_memory_is_host_memory_nothing_is_copied_home() -> None:
    with open_cpu_pool(1) as pool:
        host, ready = download(pool.devices[0], X)
        assert host is X
        assert ready is None
        assert Value(X).fetch(pool.devices[0], read_only=True) is X


def upload(pool: CheckedPool, sources: list[torch.Tensor]) -> list[torch.Tensor]:
    (device,) = pool.devices

    def arrive() -> list[torch.Tensor]:
        chunks = ChunkedUpload(device)
        targets = [chunks.add(source, Category.WEIGHTS) for source in sources]
        total = sum(s.numel() * s.element_size() for s in sources)
        assert chunks.remaining_bytes == total
        chunks.issue(1)
        # One piece, however little was asked for, and never more than a piece too much.
        assert total - CHUNK_BYTES <= chunks.remaining_bytes < total
        device.wait(Stream.COMPUTE, chunks.finish())
        assert chunks.remaining_bytes == 0
        with device.compute_scope():
            clones = [target.clone() for target in targets]
        device.wait(Stream.WEIGHTS, device.record(Stream.COMPUTE))  # before the targets are dropped
        return clones

    return run_on(pool, 0, arrive).result()


def test_large_tensors_go_up_in_pieces_that_make_up_the_whole() -> None:
    copies: list[tuple[int, ...]] = []
    checks = CpuChecks(on_copy=lambda info: copies.append(info.shape))
    rows = 5
    large = torch.arange(rows * CHUNK_BYTES // 8, dtype=torch.float32).view(rows, -1)
    small = torch.ones(3)
    with watched_pool(1, checks) as pool:
        got = upload(pool, [large, small])
    assert torch.equal(got[0], large)
    assert torch.equal(got[1], small)
    assert copies == [(2, CHUNK_BYTES // 8), (2, CHUNK_BYTES // 8), (1, CHUNK_BYTES // 8), (3,)]


def test_tensors_that_cannot_be_cut_go_up_whole() -> None:
    copies: list[tuple[int, ...]] = []
    checks = CpuChecks(on_copy=lambda info: copies.append(info.shape))
    with watched_pool(1, checks) as pool:
        upload(pool, [torch.ones(2), torch.tensor(1.0)])
    assert copies == [(2,), ()]


def test_one_tensor_in_several_places_is_one_value() -> None:
    x = torch.ones(2, requires_grad=True)
    border = Border.from_host({"a": x, "b": [x, 3], "c": torch.ones(2)}, keep_grad=True)
    assert len(list(border.values())) == 2
    assert [tensor for tensor, _ in border.sources] == [x]
    tree = border.home()
    assert tree["a"] is tree["b"][0]
    assert tree["b"][1] == 3
    assert Border.from_host(x, keep_grad=False).sources == []
