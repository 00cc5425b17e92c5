"""Entry point of the `penstock` command.

Only `run` turns exceptions into one line on stderr and an exit code: 0 done, 1 the operation failed, 2 wrong usage,
130 interrupted. An unexpected exception is our bug and keeps its traceback.

`penstock serve` has a CPU budget from exec to ready, and importing Typer alone takes a third of it (it imports
pydantic). So `serve` is dispatched here before Typer is imported; the other commands are in ``commands``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from penstock.cli.failures import Failure, WrongUsage

FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (``sys.argv`` when none is given) and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _open_what_is_closed()
    try:
        _refuse_what_is_no_text(words)
        code = _dispatch(words)
        # Here, not at interpreter exit, so that the handler below catches a broken pipe.
        sys.stdout.flush()
    except Failure as failure:
        return _complain(str(failure), FAILED)
    except WrongUsage as error:
        return _complain(str(error), WRONG_USAGE)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return FAILED
    return code


def _open_what_is_closed() -> None:
    """Open closed standard streams (`>&-`) on /dev/null: the next socket would get their descriptors."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # open() returns the lowest free descriptor, which is this one. Child processes (a JVM) inherit it.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def _refuse_what_is_no_text(words: list[str]) -> None:
    """Refuse arguments that are not UTF-8: Kafka's strings are UTF-8, and librdkafka crashes on other bytes."""
    for word in words:
        if not word.isascii() and os.fsencode(word).decode("utf-8", "replace") != word:
            raise WrongUsage(f"{ascii(os.fsencode(word))[1:]} is not UTF-8; put other bytes into a file")


def _dispatch(words: list[str]) -> int:
    if words[:1] == ["serve"]:
        from penstock.cli.serve import serve  # noqa: PLC0415  # each command pays for its own imports only

        return serve(words[1:])
    from penstock.cli.commands import dispatch  # noqa: PLC0415  # Typer, and with it pydantic

    return dispatch(words)


def _complain(text: str, code: int) -> int:
    """Print an error as one line, so that it can be grepped and logged."""
    from penstock.cli.output import printable  # noqa: PLC0415  # only where something is wrong

    print(f"penstock: {printable(' '.join(text.split()))}", file=sys.stderr)
    return code


def _drop_output() -> None:
    """Point stdout at /dev/null, so that the flush at interpreter exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
