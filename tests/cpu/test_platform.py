"""When our platform offers itself and how it shares out cores."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.platforms import current_platform

from echo_sgl.cpu import PLATFORM_CLASS, activate
from echo_sgl.cpu.platform import ATTENTION_BACKEND, EchoCpuPlatform, cores_by_rank


@pytest.fixture(autouse=True)
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    for device in (torch.cuda, torch.xpu, torch.mps):
        monkeypatch.setattr(device, "is_available", lambda: False)
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)


def test_it_offers_itself_on_a_machine_without_accelerator() -> None:
    assert activate() == f"{EchoCpuPlatform.__module__}.{EchoCpuPlatform.__name__}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="another platform is chosen there")
def test_sglang_finds_it_by_its_entry_point() -> None:
    assert isinstance(current_platform, EchoCpuPlatform)


@pytest.mark.parametrize("device", ["cuda", "xpu", "mps"])
def test_it_stands_aside_for_an_accelerator(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getattr(torch, device), "is_available", lambda: True)
    assert activate() is None


def test_it_stands_aside_for_sglangs_own_cpu_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert activate() is None
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "0")
    assert activate() == PLATFORM_CLASS


def test_the_backends_name_becomes_a_valid_choice_once() -> None:
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

    EchoCpuPlatform()
    EchoCpuPlatform()
    assert ATTENTION_BACKEND_CHOICES.count(ATTENTION_BACKEND) == 1


@pytest.mark.parametrize(
    ("cores", "num_ranks", "expected"),
    [
        ({0, 1}, 2, "0|1"),
        ({3, 5, 8, 9}, 2, "3,5|8,9"),
        ({0, 1, 2}, 2, "0|1"),
        ({0, 1}, 4, "0|1|0|1"),
        ({7}, 2, "7|7"),
    ],
)
def test_every_rank_gets_cores_of_its_own_while_they_last(
    cores: set[int], num_ranks: int, expected: str
) -> None:
    assert cores_by_rank(cores, num_ranks) == expected
