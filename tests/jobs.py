"""Jobs for another process. They have to be at the top level of a module that it can import."""

from __future__ import annotations

import errno
import os
import sys
import time

from penstock.environment import Files


def process_id(files: Files, argument: object) -> int:
    return os.getpid()


def total(files: Files, numbers: list[int]) -> int:
    return sum(numbers)


def copy(files: Files, names: tuple[str, str]) -> int:
    """Copy a file, a byte at a time."""
    source, target = names
    data = files.read(source)
    file = files.open(target)
    for byte in data:
        file.append([bytes((byte,))])
    file.close()
    return len(data)


def append_to_argument(files: Files, numbers: list[int]) -> list[int]:
    numbers.append(len(numbers))
    return numbers


def find_the_disk_full(files: Files, path: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


class Unpicklable(Exception):
    """Its arguments are not what its constructor takes."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} and {other}")


def fail_in_its_own_way(files: Files, argument: object) -> None:
    raise Unpicklable("this", "that")


def return_something_unpicklable(files: Files, argument: object) -> object:
    return lambda: None


def talk(files: Files, text: str) -> str:
    sys.stdout.write(text)
    sys.stdout.flush()
    os.write(1, text.encode())
    return text


def compute_for_ever(files: Files, path: str) -> None:
    """Write the id of the process, so that others see that the job runs, and then never end."""
    files.replace(path, str(os.getpid()).encode())
    while True:
        pass


def time_to_copy(files: Files, path: str) -> tuple[float, bytes]:
    """Read and write ten times a hundred kilobytes. Returns the seconds it took, and the copy."""
    began = time.monotonic()
    file, copy = files.open(path), files.open(path + ".copy")
    for _ in range(10):
        copy.append((file.read_at(0, 100_000),))
    data = copy.read_at(0, copy.size)
    file.close()
    copy.close()
    return time.monotonic() - began, data
