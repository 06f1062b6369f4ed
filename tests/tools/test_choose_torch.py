"""A CPU build of torch is taken only with a torchvision built against it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import choose_torch

ROOT = Path(__file__).resolve().parents[2]
LISTING = "torch (2.15.0)\nAvailable versions: 2.15.0, 2.14.1, 2.13.0+cpu, 2.13.0, 2.12.1+cpu, 2.8.0+cpu"


def test_only_cpu_builds_within_the_bounds_count_newest_first() -> None:
    assert choose_torch.cpu_versions(LISTING, "torch>=2.9,<2.15") == [(2, 13, 0), (2, 12, 1)]
    assert choose_torch.cpu_versions(LISTING, "torch>=2.9,<2.13") == [(2, 12, 1)]
    assert choose_torch.cpu_versions("", "torch>=2.9") == []


def test_a_torch_without_its_torchvision_is_passed_over() -> None:
    torches = [(2, 13, 0), (2, 12, 1)]
    assert choose_torch.cpu_pair(torches, [(0, 27, 1)]) == ("2.12.1+cpu", "0.27.1+cpu")
    assert choose_torch.cpu_pair(torches, [(0, 28, 0), (0, 27, 1)]) == ("2.13.0+cpu", "0.28.0+cpu")
    assert choose_torch.cpu_pair(torches, [(0, 27, 0)]) is None
    assert choose_torch.cpu_pair(torches, []) is None


Version = tuple[int, ...]
_number = st.integers(0, 12)


@given(
    low=st.tuples(_number, _number),
    high=st.tuples(_number, _number),
    version=st.tuples(_number, _number, _number),
)
def test_bounds_mean_at_least_and_less_than(
    low: tuple[int, ...], high: tuple[int, ...], version: tuple[int, ...]
) -> None:
    text = f"torch>={low[0]}.{low[1]},<{high[0]}.{high[1]}"
    assert choose_torch.admits(text, version) == (low <= version < high)


def test_the_bounds_come_from_pyproject(tmp_path: Path) -> None:
    assert choose_torch.requirement(ROOT / "pyproject.toml", "torch").startswith("torch>=")
    assert choose_torch.requirement(ROOT / "pyproject.toml", "torchvision").startswith("torchvision>=")
    with pytest.raises(LookupError, match="does not ask for nonesuch"):
        choose_torch.requirement(ROOT / "pyproject.toml", "nonesuch")


def test_a_given_index_is_used_and_said() -> None:
    choice = choose_torch.choose(Path(sys.executable), ROOT / "pyproject.toml", "pip", "https://wheels.invalid/cpu")
    assert choice.arguments[:2] == ("--index-url", "https://wheels.invalid/cpu")
    assert "TORCH_INDEX" in choice.explanation


def test_a_folder_without_matching_wheels_is_an_error_not_a_silent_fallback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose_torch, "_available", lambda *_: "torch (2.13.0+cpu)")
    with pytest.raises(LookupError, match="holds no CPU wheels"):
        choose_torch.choose(Path(sys.executable), ROOT / "pyproject.toml", "pip", str(tmp_path))


def test_without_a_pair_the_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_torch.sys, "platform", "linux")
    monkeypatch.setattr(choose_torch, "_available", lambda _python, name, _extra: f"{name} (2.13.0+cpu)")
    choice = choose_torch.choose(Path(sys.executable), ROOT / "pyproject.toml", "pip", "")
    assert choice.arguments == ()
    assert "no CPU build with a matching torchvision at hand" in choice.explanation
    assert "TORCH_INDEX=" in choice.explanation
