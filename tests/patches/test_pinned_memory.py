"""Pinned host memory is as large as what lies in it, and is unpinned when the last of it goes."""

from __future__ import annotations

import os
import types

import pytest
from mist_patches.core.hooking import log

torch = pytest.importorskip("torch", reason="the patches run inside a torch process")

from mist_patches.core import pinned_memory  # noqa: E402
from mist_patches.core.pinned_memory import Pool, pinned  # noqa: E402

PAGE = 4096


class Driver:
    """The CUDA driver's two calls, as far as they can be told apart here."""

    def __init__(self, answer: int = 0) -> None:
        self.answer, self.registered, self.log = answer, {}, []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if self.answer == 0:
            self.registered[address] = size
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        self.log.append("unregister")
        return 0


@pytest.fixture
def driver(monkeypatch):
    found = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: found.log.append("idle"))
    monkeypatch.setattr(pinned_memory, "_refused", [])
    real = torch.empty
    torchs = types.SimpleNamespace(count=0)

    def empty(*sizes, pin_memory=False, **more):
        torchs.count += pin_memory
        return real(*sizes, **more)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "zeros", lambda *_, device: found.log.append(f"kernel on {device}"))
    found.torchs = torchs
    return found


def test_exact_to_the_byte_and_aligned_to_pages(driver):
    """Just above a power of two, where torch's blocks would be twice as large."""
    held = pinned((1025, 1023), torch.bfloat16)
    assert held.shape == (1025, 1023) and held.dtype == torch.bfloat16
    assert driver.registered == {held.data_ptr(): 2 * 1025 * 1023}
    assert held.untyped_storage().nbytes() == 2 * 1025 * 1023
    assert held.data_ptr() % PAGE == 0
    held.fill_(3.0)
    assert float(held.float().sum()) == 3.0 * held.numel()
    assert driver.torchs.count == 0


def test_unpinned_with_the_last_view_and_only_when_the_device_is_idle(driver):
    held = pinned((64,), torch.float32)
    view = held[3:5]
    del held
    assert driver.registered and not driver.log
    del view
    assert not driver.registered and driver.log == ["idle", "unregister"]


def test_a_forked_process_leaves_it_alone(driver, monkeypatch):
    held = pinned((64,), torch.float32)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    del held
    assert len(driver.registered) == 1


@pytest.mark.parametrize("how", ["driver", "torch"])
def test_falls_back_to_torch_once_and_says_so(driver, monkeypatch, caplog, how):
    monkeypatch.setattr(log, "propagate", True)  # applying patches in this process switched it off
    caplog.set_level("DEBUG", log.name)
    if how == "driver":
        driver.answer = 1
    else:
        monkeypatch.setattr(torch.cuda, "cudart", lambda: None)
    for _ in range(2):
        assert pinned((5, 7), torch.float32).shape == (5, 7)
    assert driver.torchs.count == 2 and not driver.registered
    assert driver.log == (["kernel on cuda"] if how == "driver" else []), "which takes the error's report"
    assert len([line for line in caplog.messages if "powers of two" in line]) == 1


def test_nothing_needs_no_pages(driver):
    assert pinned((0, 4), torch.float32).numel() == 0
    assert not driver.registered


def test_a_pool_uses_again_what_was_given_back(driver):
    pool = Pool()
    for _ in range(5):
        buffers = [pool.take(size) for size in (1000, 3000, 1000)]
        for buffer in buffers:
            pool.give(buffer)
        del buffers, buffer
    assert sorted(driver.registered.values()) == [1000, 1000, 3000]
    assert (pool.used_bytes, pool.most_used_bytes, pool.spare_bytes) == (0, 5000, 5000)


def test_a_pool_pins_little_where_sizes_are_alike(driver, monkeypatch):
    """Each of these calls stops the device. A buffer may be an eighth larger than what is asked, no more."""
    pins, pool = [], Pool()
    register = driver.cudaHostRegister
    monkeypatch.setattr(
        driver,
        "cudaHostRegister",
        lambda address, size, flags: pins.append(size) or register(address, size, flags),
    )
    for step in range(60):
        buffers = [pool.take(9000 + (step * 37 + k * 11) % 1000) for k in range(4)]
        assert [b.nbytes for b in buffers] == [9000 + (step * 37 + k * 11) % 1000 for k in range(4)]
        for buffer in buffers:
            buffer.fill_(step % 256)
            pool.give(buffer)
        del buffers, buffer
    assert len(pins) <= 40 and driver.log.count("idle") <= 40, "of 240 that were asked"
    assert pool.used_bytes == 0 and pool.most_used_bytes <= 4 * 1.125 * 10000
    small = pool.take(100)
    assert small.nbytes == small.untyped_storage().nbytes() == 100


def test_a_pool_of_ever_new_sizes_stays_small(driver):
    """Packed sequences make other sizes in every step."""
    pool = Pool()
    for step in range(50):
        buffers = [pool.take(1000 + 10 * step + k) for k in range(4)]
        assert sum(driver.registered.values()) <= 1.25 * pool.most_used_bytes + 2000
        for buffer in buffers:
            pool.give(buffer)
        del buffers, buffer
    assert sum(driver.registered.values()) == pool.spare_bytes <= 1.25 * pool.most_used_bytes + 2000


def test_a_pool_parts_with_what_was_given_back_first(driver):
    pool = Pool()
    first, second = pool.take(1000), pool.take(3000)
    kept = second.data_ptr()
    pool.give(first)
    pool.give(second)
    del first, second
    other = pool.take(1800)
    assert driver.registered[kept] == 3000, "the one of the last layer comes again next"
    assert sorted(driver.registered.values()) == [1800, 3000] and other.nbytes == 1800
