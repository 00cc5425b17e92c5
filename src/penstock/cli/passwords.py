"""Passwords that a command needs: asked for without echo, or read from standard input or a file.

Never from an argument: every user of the machine could read it, and the shell would remember it.
"""

from __future__ import annotations

import getpass
import sys
from typing import Annotated

import typer

from penstock.cli.failures import Failure, WrongUsage

PASSWORD_BYTES_MAX = 4096

PasswordStdin = Annotated[
    bool, typer.Option("--password-stdin", help="Read the password from the first line of standard input.")
]
PasswordFile = Annotated[
    str | None,
    typer.Option("--password-file", metavar="FILE", help="Read the password from the first line of a file."),
]


def read_password(user: str, *, from_stdin: bool, file: str | None) -> str:
    """Raises Failure or WrongUsage, which never contain it."""
    if from_stdin and file is not None:
        raise WrongUsage("pass --password-stdin or --password-file, not both")
    if file is not None:
        with open(file, "rb") as opened:
            return _first_line(opened.readline(PASSWORD_BYTES_MAX + 2), file)
    if from_stdin:
        return _first_line(sys.stdin.buffer.readline(PASSWORD_BYTES_MAX + 2), "standard input")
    if not sys.stdin.isatty():
        raise WrongUsage(
            "there is no terminal to ask for the password on; pass --password-stdin or --password-file FILE"
        )
    password = getpass.getpass(f"Password of {user}: ")
    if not password:
        raise Failure("a password must not be empty; nothing was done")
    if getpass.getpass("Again: ") != password:
        raise Failure("the passwords differ; nothing was done")
    return password


def _first_line(data: bytes, where: str) -> str:
    line = data.removesuffix(b"\n").removesuffix(b"\r")
    if not line:
        raise Failure(f"there is no password in the first line of {where}")
    if len(line) > PASSWORD_BYTES_MAX:
        raise Failure(f"the password in {where} has more than {PASSWORD_BYTES_MAX} bytes")
    try:
        return line.decode()
    except UnicodeDecodeError:
        # Its own message would contain the password.
        raise Failure(f"the password in {where} is not UTF-8") from None
