"""`offload doctor`: every fact once, its exit code, and what it does when nobody reads on."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from offload.cli import main
from offload.planning.checkup import Check
from tests.loops import ROOT


def names_in(lines: str) -> list[str]:
    return re.findall(r"^  (?:ok|warn|fail) +(\S+(?: \S+)*)  ", lines, re.MULTILINE)


def test_every_fact_is_said_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    new = tmp_path / "new"
    assert main(["doctor", str(tmp_path), "--swap", str(new)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    machine, rest = printed.out.split(f"\n{tmp_path}\n")
    here, there = rest.split(f"\n{new}\n")
    about_kernels = ["native core", "instruction set", "checksums", "threads"]
    about_memory = ["locked memory", "memory", "memory limit", "huge pages", "NUMA"]
    assert names_in(machine) == ["versions", "accelerator", *about_kernels, "I/O backend", *about_memory]
    assert names_in(here) == names_in(there) == ["access", "file system", "disk", "room", "dead runs", "I/O"]
    assert "prepare_swap.sh" in there
    assert list(tmp_path.iterdir()) == []


def test_no_direct_io_is_a_line_and_no_second_warning(
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("offload.storage.swapfile._O_DIRECT", 0)
    assert main(["doctor", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("O_DIRECT") == 1
    assert caplog.messages == []


def test_a_directory_that_cannot_be_used_fails(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert main(["doctor", "--json", str(file), str(tmp_path)]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["status"] == "fail"
    bad, good = result["directories"]
    assert bad["directory"] == str(file)
    assert bad["checks"][0] == {
        "name": "access",
        "status": "fail",
        "found": "not a directory",
        "remedy": "name a directory",
    }
    assert good["error"] == ""
    assert {check["status"] for check in [*good["checks"], *result["machine"]]} <= {"ok", "warn"}
    assert main(["doctor", str(file)]) == 1
    assert "fail access           not a directory" in capsys.readouterr().out


def test_lines_fit_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("OFFLOAD_IO", "pigeons")
    assert main(["doctor", str(tmp_path)]) == 1
    for line in capsys.readouterr().out.splitlines():
        assert len(line) < 80 or line == str(tmp_path)


WELL = [Check("versions", "ok", "offload 1.0, Python 3.12.1, torch 2.11.0"), Check("NUMA", "ok", "one node")]
IN_WORDS = """\
this machine
  ok   versions         offload 1.0, Python 3.12.1, torch 2.11.0
  ok   NUMA             one node
all is well
"""
NOT_SO_WELL = [
    Check("huge pages", "warn", "off: large buffers lie in pages of 4 KiB, which costs updates speed", "echo madvise"),
    Check("versions", "fail", "offload 1.0, Python 3.12.1, torch 2.1.0", "install torch 2.11 or later"),
]
WITH_REMEDIES = """\
this machine
  warn huge pages       off: large buffers lie in pages of 4 KiB, which costs
                        updates speed
                        -> echo madvise
  fail versions         offload 1.0, Python 3.12.1, torch 2.1.0
                        -> install torch 2.11 or later
1 fail, 1 to look at: what fails must be put right
"""


@pytest.mark.parametrize(("checks", "code", "shown"), [(WELL, 0, IN_WORDS), (NOT_SO_WELL, 1, WITH_REMEDIES)])
def test_what_is_printed_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, checks: list[Check], code: int, shown: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("offload.planning.checkup.check_machine", lambda version: checks)
    assert main(["doctor"]) == code
    assert capsys.readouterr().out == shown


def test_the_directories_of_a_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "swap.toml"
    file.write_text(f'tiers = ["gpu", "nvme"]\nswap_dirs = ["{tmp_path}"]\n')
    assert main(["doctor", "--config", str(file)]) == 0
    assert f"\n{tmp_path}\n" in capsys.readouterr().out
    assert main(["doctor", "--config", str(file), "--show-config"]) == 0
    assert f"# file {file}" in capsys.readouterr().out
    assert main(["doctor", "--show-config"]) == 2
    assert "--config" in capsys.readouterr().err


def test_nobody_reads_on() -> None:
    # The reader has gone before the first word is printed.
    code = (
        "import os, sys\n"
        "r, w = os.pipe()\n"
        "os.close(r)\n"
        "os.dup2(w, 1)\n"
        "from offload.cli import main\n"
        "sys.exit(main(['doctor', '--json']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (141, "")
