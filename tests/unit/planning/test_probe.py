"""A probe finds every figure that a plan on this machine needs. How large they are is nobody's promise."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.errors import ConfigError
from offload.planning import probe as probing
from offload.planning.profile import HardwareProfile, load_profile


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "_WIDTHS", (64, 128))
    monkeypatch.setattr(probing, "_TOKENS", (16, 32))
    monkeypatch.setattr(probing, "_VOCABULARY", 256)
    monkeypatch.setattr(probing, "_LENGTHS", (16, 32))
    monkeypatch.setattr(probing, "_SHARE_S", 1e-4)


@pytest.mark.host
@pytest.mark.usefixtures("_short")
def test_everything_that_a_plan_needs(tmp_path: Path) -> None:
    said: list[tuple[str, int, int]] = []
    profile = probing.probe([tmp_path], quick=True, network=False, progress=lambda *what: said.append(what))
    assert profile.lacking(accelerated=False, swaps=True, ranks=1) == []
    assert profile.accelerator == "none"
    assert profile.operation_us > 0
    assert profile.process is not None
    assert 50 << 20 < profile.process < 4 << 30
    assert [disk.directory for disk in profile.disks] == [str(tmp_path)]
    assert 0 < profile.disks[0].cpu < 100
    for shapes in profile.matrix.values():
        assert (16.0, 64.0, 64.0) in {shape[:3] for shape in shapes}
        assert all(rate > 0 for *_, rate in shapes)
    assert [entry[1] for entry in said] == list(range(len(said)))
    assert said[-1][1] == said[-1][2]
    assert not list(tmp_path.iterdir())
    (tmp_path / "p.toml").write_text(profile.to_toml())
    assert load_profile(tmp_path / "p.toml") == profile


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        probing.probe([tmp_path / "none"])


def test_a_figure_that_is_not_there_is_not_predicted() -> None:
    assert "adam" in HardwareProfile("x").lacking(accelerated=False, swaps=False, ranks=1)
