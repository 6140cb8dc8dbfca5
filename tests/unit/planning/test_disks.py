"""What a directory lies on, read from made-up system files and from this machine."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from offload.planning.disks import Mount, inspect, mount_of, quiet_log, rotational
from offload.storage.io import open_backend


def mountinfo(folder: Path, *lines: str) -> Path:
    file = folder / "mountinfo"
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def test_the_innermost_mount_is_found_and_the_later_of_two(tmp_path: Path) -> None:
    inside = tmp_path / "a disk"
    (inside / "swap").mkdir(parents=True)
    point = str(inside).replace(" ", "\\040")
    file = mountinfo(
        tmp_path,
        "20 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw",
        f"21 20 0:30 / {point} rw - tmpfs old rw",
        f"22 21 259:1 / {point} ro,noatime - xfs /dev/nvme0n1 rw",
        f"23 20 0:31 / {point}ette rw - nfs4 host:/x rw",
    )
    assert mount_of(inside / "swap", file) == Mount(str(inside), "xfs", "/dev/nvme0n1", ("ro", "noatime"))
    (tmp_path / "link").symlink_to(inside)
    assert mount_of(tmp_path / "link", file) == mount_of(inside, file)
    assert mount_of(Path("/"), file) == Mount("/", "ext4", "/dev/sda1", ("rw", "relatime"))
    assert mount_of(Path("/"), tmp_path / "missing") is None


@pytest.mark.parametrize(("text", "expected"), [("1\n", True), ("0\n", False)])
def test_a_partition_asks_its_disk(tmp_path: Path, text: str, expected: bool) -> None:
    disk = tmp_path / "devices" / "sda"
    (disk / "queue").mkdir(parents=True)
    (disk / "queue" / "rotational").write_text(text)
    (disk / "sda1").mkdir()
    blocks = tmp_path / "block"
    blocks.mkdir()
    (blocks / "8:0").symlink_to(disk)
    (blocks / "8:1").symlink_to(disk / "sda1")
    for minor in (0, 1):
        assert rotational(os.makedev(8, minor), None, blocks) is expected
    assert rotational(os.makedev(9, 0), None, blocks) is None
    assert rotational(os.makedev(0, 40), Mount("/", "btrfs", "/dev/hidden", ()), blocks) is None


def test_inspecting_leaves_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with open_backend() as backend:
        here, new, wrong = (inspect(path, backend) for path in (tmp_path, tmp_path / "a" / "b", file))
    assert (here.directory, here.exists, here.error) == (tmp_path, True, "")
    assert here.free > 0
    assert here.owner == os.getuid()
    assert (new.directory, new.exists, new.error) == (tmp_path / "a" / "b", False, "")
    assert new.device == here.device
    assert wrong.error
    assert list(tmp_path.iterdir()) == [file]


def test_the_log_is_quiet_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("offload")
    with quiet_log():
        log.warning("not now")
    log.warning("now")
    assert caplog.messages == ["now"]
