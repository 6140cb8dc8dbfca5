"""The checks and the benchmark of scripts/gpu_check.sh: one JSON file out. See its --help."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TEST_SECONDS = 200  # for the project's own tests; what has not finished by then is reported as that
NEEDS_A_NETWORK = "--ignore=tests/behaviour/test_package.py"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--swap", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--no-benchmark", action="store_true")
    parser.add_argument("--extra", type=Path, help="folder with packages for what the machine lacks")
    options = parser.parse_args()
    if options.extra is not None and options.extra.is_dir():
        sys.path.append(str(options.extra))
    try:
        import offload
    except ImportError as error:
        print(f"gpu_check.sh: error: {error}; install it, or see --pack in --help", file=sys.stderr)
        return 2
    import gpu_bench
    import gpu_checks
    import torch

    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "simulated"
    os.environ["OFFLOAD_DEVICE"] = device
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if cuda else device,
        "device_memory_bytes": torch.cuda.get_device_properties(0).total_memory if cuda else None,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "build_info": offload.build_info(),
        "checks": [],
    }
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="offload-gpu-check-", dir=options.swap) as swap:
        for name, check in gpu_checks.CHECKS.items():
            result["checks"].append(_attempt(name, lambda check=check: check(device, Path(swap))))
            _write(options.json, result)
        if not options.no_tests:
            result["tests"] = _tests(options.extra)
            _write(options.json, result)
        if not options.no_benchmark:
            shape = "7B" if cuda and not options.small else "small"
            result["benchmark"] = _attempt(shape, lambda: gpu_bench.measure(device, shape))
    result["seconds"] = time.perf_counter() - started
    _write(options.json, result)
    outcomes = [check["passed"] for check in result["checks"]]
    if "benchmark" in result:
        outcomes.append(result["benchmark"]["passed"])
    failed = outcomes.count(False) + result.get("tests", {}).get("failed", 0)
    passed = outcomes.count(True) + result.get("tests", {}).get("passed", 0)
    print(f"figures: {options.json}")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


def _attempt(name: str, action: Callable[[], Any]) -> dict[str, Any]:
    begin = time.perf_counter()
    outcome: dict[str, Any] = {"name": name}
    try:
        outcome |= {"passed": True, "figures": action()}
    except Exception as error:  # noqa: BLE001  whatever it is, it goes into the report and the next check runs
        outcome |= {"passed": False, "error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    outcome["seconds"] = round(time.perf_counter() - begin, 2)
    print(f"{'passed' if outcome['passed'] else 'FAILED'}  {name}  {outcome['seconds']} s", file=sys.stderr, flush=True)
    if not outcome["passed"]:
        print(outcome["traceback"], file=sys.stderr, flush=True)
    return outcome


def _tests(extra: Path | None) -> dict[str, Any]:
    """The project's own tests of behaviour on this device, as far as pytest and hypothesis are there."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(extra) if extra else None]))
    environment = {**os.environ, "PYTHONPATH": path}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        "tests/behaviour",
        NEEDS_A_NETWORK,
    ]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TEST_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as late:
        text = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        return {"passed": 0, "failed": 1, "note": f"not finished within {TEST_SECONDS} s", "output": text[-4000:]}
    lines = done.stdout.strip().splitlines()
    last = lines[-1] if lines else done.stderr.strip()[-200:]
    counts = {word: _count(last, word) for word in ("passed", "failed", "error", "skipped")}
    note = last if any(counts.values()) else f"not run: {last}"
    print(f"tests: {note}", file=sys.stderr, flush=True)
    counts["failed"] += counts.pop("error")
    if done.returncode and not counts["failed"]:  # no pytest, a crash, nothing collected: that is not success
        counts["failed"] = 1
    return {**counts, "note": note, "output": done.stdout[-8000:] if counts["failed"] else ""}


def _count(line: str, word: str) -> int:
    parts = line.replace(",", " ").split()
    found = [int(a) for a, b in itertools.pairwise(parts) if b.rstrip("s") == word.rstrip("s") and a.isdigit()]
    return found[0] if found else 0


def _write(path: Path, result: dict[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
