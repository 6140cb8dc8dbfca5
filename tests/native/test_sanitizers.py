"""Builds the C++ tests of the native core with sanitizers and runs them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
CMAKE = shutil.which("cmake", path=PATH)
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-6000:]}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_the_core_is_clean(tmp_path: Path, sanitizers: str) -> None:
    if COMPILER is None or CMAKE is None:
        pytest.skip("no C++ compiler or no CMake on this machine")
    probe = tmp_path / "probe.cpp"
    probe.write_text("int main() { return 0; }\n")
    sanitized = [COMPILER, f"-fsanitize={sanitizers}", str(probe), "-o", str(tmp_path / "probe")]
    if (
        subprocess.run(sanitized, capture_output=True).returncode
        or subprocess.run([str(tmp_path / "probe")]).returncode
    ):
        pytest.skip(f"{COMPILER} cannot build or run programs with -fsanitize={sanitizers} here")
    build = str(tmp_path / "build")
    run(
        *(CMAKE, "-S", str(ROOT / "native"), "-B", build, f"-DCMAKE_CXX_COMPILER={COMPILER}"),
        *("-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DOFFLOAD_TESTS=ON", f"-DOFFLOAD_SANITIZE={sanitizers}"),
    )
    run(CMAKE, "--build", build, "--parallel", "2")
    options = {
        "ASAN_OPTIONS": "detect_leaks=1:strict_string_checks=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
    }
    for program in ("test_kernels", "test_crc32c", "test_aio"):
        assert "all well" in run(f"{build}/tests/{program}", **options)
