"""What `pip install .` yields: with a compiler the native core in a py3 wheel, without one a package that works."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from offload import native

ROOT = Path(__file__).resolve().parents[2]
TOOLS = str(Path(sys.executable).parent)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("scikit_build_core") is None, reason="needs scikit-build-core (offload[test])"
    ),
]

UPDATE = """
import hashlib, torch
from offload import native
torch.manual_seed(0)
param, grad, m, v = torch.randn(10_007), torch.randn(10_007).bfloat16(), torch.zeros(10_007), torch.zeros(10_007)
out = torch.empty(10_007, dtype=torch.bfloat16)
for step in (1, 2, 3):
    native.adamw_(param, grad, m, v, step=step, lr=1e-2, weight_decay=0.1, out=out)
bits = [param, m, v, out.float(), torch.tensor(native.sum_squares(grad))]
digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in bits)).hexdigest()
print(native.available(), "|", native.reason(), "|", native.isas(), "|", digest)
print(native.__file__)
"""


def run(command: list[str], **environment: str) -> str:
    env = {**os.environ, "PATH": os.pathsep.join([TOOLS, os.environ.get("PATH", os.defpath)]), **environment}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, cwd="/")
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-6000:]}"
    return done.stdout


def build_wheel(tmp_path: Path, **environment: str) -> Path:
    source = tmp_path / "source"
    for name in ("offload", "native"):  # with a library that was built in place, if there is one
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    run([*pip, "--wheel-dir", str(tmp_path / "wheels"), str(source)], **environment)
    (wheel,) = (tmp_path / "wheels").iterdir()
    return wheel


def update_with(wheel: Path, tmp_path: Path) -> list[str]:
    """Installs the wheel into a folder of its own and runs UPDATE from there."""
    target = tmp_path / "installed"
    run([sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)])
    # Without `site`, or an editable install of this tree would be found before PYTHONPATH.
    path = os.pathsep.join([str(target), *{sysconfig.get_path(kind) for kind in ("purelib", "platlib")}])
    lines = run([sys.executable, "-S", "-c", UPDATE], PYTHONPATH=path).splitlines()
    assert lines[-1].startswith(str(target))
    return [part.strip() for part in lines[-2].split("|")]


def here() -> list[str]:
    script = [sys.executable, "-c", UPDATE]
    return [p.strip() for p in run(script, PYTHONPATH=str(ROOT)).splitlines()[-2].split("|")]


@pytest.mark.skipif(not native.available(), reason="no compiler: the native core was not built here either")
def test_one_wheel_with_the_native_core_for_every_python_3(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    _, _, python, abi, platform = wheel.stem.split("-")
    assert (python, abi) == ("py3", "none")
    assert platform != "any"
    files = zipfile.ZipFile(wheel).namelist()
    assert [name for name in files if "liboffload_native" in name] == ["offload/_lib/liboffload_native.so"]
    assert not any(name.endswith((".cpp", ".h")) or name.startswith(("native/", "tests/")) for name in files)
    assert "offload/torch_kernels.py" in files
    available, reason, isas, bits = update_with(wheel, tmp_path)
    assert (available, reason) == ("True", "")
    assert isas == str(native.isas())
    assert bits == here()[3]


def test_without_a_compiler_the_package_works_and_says_why(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, CC="/nonexistent/cc", CXX="/nonexistent/c++")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not any("/_lib/" in name for name in zipfile.ZipFile(wheel).namelist())
    available, reason, isas, bits = update_with(wheel, tmp_path)
    assert available == "False"
    assert "compiler" in reason
    assert isas == "['torch']"
    assert bits == here()[3]
