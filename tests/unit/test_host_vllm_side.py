"""Modules of ours that run in vLLM's environment, with stand-ins for what they ask of it."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from opengyre.host.vllm_process import SIDE

torch = pytest.importorskip("torch", reason="the worker's extension is made with torch")


def extension(monkeypatch: pytest.MonkeyPatch, *pool: SimpleNamespace) -> object:
    """On a GPU whose pool of the sleep mode holds these."""
    allocator = SimpleNamespace(pointer_to_data=dict(enumerate(pool)))
    cumem = ModuleType("vllm.device_allocator.cumem")
    cumem.CuMemAllocator = SimpleNamespace(get_instance=lambda: allocator)  # type: ignore[attr-defined]  # a stand-in
    for name in ("vllm", "vllm.device_allocator"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, cumem.__name__, cumem)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # What torch says it gave out does not go down when the pool sleeps.
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 7 << 30)
    monkeypatch.syspath_prepend(str(SIDE))
    monkeypatch.delitem(sys.modules, "gyre_vllm_worker", raising=False)
    from gyre_vllm_worker import Extension  # pyright: ignore[reportMissingImports]  # of vLLM's side

    return Extension()


def test_a_gpu_that_sleeps_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch counts the pool as allocated all the same, so no drain came to its end."""

    def part(size: int, *, asleep: bool) -> SimpleNamespace:
        return SimpleNamespace(handle=(0, size, 0, 0), is_asleep=asleep)

    awake = extension(monkeypatch, part(3 << 30, asleep=False), part(1 << 30, asleep=False))
    assert awake.gyre_memory() == {"allocated": 4 << 30}  # type: ignore[attr-defined]  # an Extension
    asleep = extension(monkeypatch, part(3 << 30, asleep=True), part(1 << 30, asleep=True))
    assert asleep.gyre_memory() == {"allocated": 0}  # type: ignore[attr-defined]  # an Extension
