"""Which file system a folder is on, out of what the kernel says of mounts."""

import os

import pytest

from opengyre.sandbox.disks import file_system

MOUNTS = (
    "22 27 0:21 / /proc rw,relatime - proc proc rw\n"
    "27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw,discard\n"
    "31 27 0:26 / /run rw,nosuid,nodev - tmpfs tmpfs rw,size=804520k,mode=755\n"
)


@pytest.mark.parametrize(("device", "kind"), [((254, 0), "ext4"), ((0, 26), "tmpfs"), ((8, 1), "")])
def test_a_folder_s_file_system_is_found_by_its_device(device: tuple[int, int], kind: str) -> None:
    assert file_system(MOUNTS, os.makedev(*device)) == kind
