"""What `import offload` and the command line load, and what they leave alone. Counts modules, not seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import offload
from tests.loops import ROOT

COMMANDS = ["", "finetune", "plan", "probe", "tune", "doctor", "report", "convert-config"]


def python(code: str, *arguments: str, path: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {[path] if path else []}\n{code}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_needs_no_torch(tmp_path: Path, command: str) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')\n")
    code = "from offload.cli import main\nmain()"
    arguments = [*command.split(), "--help"]
    assert "usage: offload" in python(code, *arguments, path=str(tmp_path))


def test_every_public_name_is_where_it_is_said_to_be() -> None:
    assert sorted(offload._HOME_OF) == sorted(offload.__all__)
    for name in offload.__all__:
        assert name in dir(offload)
        assert getattr(offload, name).__name__.rpartition(".")[2] == name
    with pytest.raises(AttributeError, match="no attribute 'rap'"):
        _ = offload.rap


def test_import_loads_nothing_of_others() -> None:
    code = "import torch\nbefore = set(sys.modules)\nimport offload\nprint(*sorted(set(sys.modules) - before))"
    assert python(code).split() == ["offload"]


def test_files_move_after_a_bare_import(tmp_path: Path) -> None:
    code = (
        "import sys, torch, offload\nt = torch.arange(5000)\noffload.storage.io.write_file(sys.argv[1], t)\n"
        "print(torch.equal(offload.storage.io.read_file(sys.argv[1], torch.empty_like(t)), t))"
    )
    assert python(code, str(tmp_path / "file")).split() == ["True"]
    with pytest.raises(AttributeError, match="no attribute 'oi'"):
        _ = offload.storage.oi


def test_all_public_names_load_only_what_they_need() -> None:
    code = (
        "import torch\nbefore = {name.split('.')[0] for name in sys.modules}\nimport offload\n"
        "for name in offload.__all__:\n    getattr(offload, name)\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules} - before - set(sys.stdlib_module_names)))\n"
        "print(*[name for name in sys.modules if name.startswith('offload.') and 'integrations' in name])"
    )
    others, ours = python(code).split("\n")[:2]
    assert set(others.split()) <= {"offload", "numpy", "safetensors", "tomli", "ml_dtypes", "_distutils_hack"}
    assert "offload.integrations.finetune" not in ours
