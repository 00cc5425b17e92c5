"""`penstock users`: who can log in with a password (SCRAM, KIP-554), and the first user of a new cluster.

The password stays here: the broker gets it salted, and stores what is enough to recognise it.
"""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from penstock.cli.failures import Failure, WrongUsage
from penstock.cli.options import BOOTSTRAP, Bootstrap, Config, Json, Yes
from penstock.cli.output import confirm, count_text, show_json, show_table
from penstock.cli.passwords import PasswordFile, PasswordStdin, read_password
from penstock.cli.raw import RawClient, reason, refuse
from penstock.cli.serve import DATA_DIR
from penstock.cli.subcommands import subcommands
from penstock.metadata import first_users
from penstock.metadata.first_users import FILE_NAME, ITERATIONS
from penstock.metadata.security import ScramMechanism
from penstock.metadata.users import name_error
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.security import (
    AlterUserScramCredentialsRequest,
    DescribeUserScramCredentialsRequest,
    ScramCredentialDeletion,
    ScramCredentialUpsertion,
    UserName,
)
from penstock.sasl import SaslError
from penstock.sasl.scram import ITERATIONS_MAX, ITERATIONS_MIN

app = typer.Typer(
    add_completion=False,
    cls=subcommands("list", {"create": "`penstock users add`", "delete": "`penstock users remove`"}),
    help="Show and change who can log in with a password. Default command: list.",
)

MECHANISMS = {each.sasl_name: (each,) for each in ScramMechanism} | {"both": tuple(ScramMechanism)}
# Beside the file of the first users, they show that the cluster is not new.
IN_USE = ("meta.properties", "__cluster_metadata-0")


def _check_name(value: Any) -> Any:
    for name in [value] if isinstance(value, str) else value or []:
        if (error := name_error(name)) is not None:
            raise WrongUsage(error.removesuffix("."))
    return value


def _mechanisms(text: str) -> tuple[ScramMechanism, ...]:
    for name, found in MECHANISMS.items():
        if text.upper() == name.upper():
            return found
    raise typer.BadParameter(f"{text!r} is not one of {', '.join(MECHANISMS)}")


User = Annotated[str, typer.Argument(metavar="USER", callback=_check_name)]
Users = Annotated[list[str], typer.Argument(metavar="USER", callback=_check_name)]
SomeUsers = Annotated[
    list[str] | None, typer.Argument(metavar="[USER]...", callback=_check_name, show_default=False)
]
SHA_512: Any = ScramMechanism.SCRAM_SHA_512.sasl_name
Mechanism = Annotated[
    Any,
    typer.Option(
        "--mechanism", metavar="NAME", parser=_mechanisms, help="SCRAM-SHA-256, SCRAM-SHA-512, or both."
    ),
]
SomeMechanism = Annotated[
    Any,
    typer.Option(
        "--mechanism",
        metavar="NAME",
        parser=_mechanisms,
        help="Only SCRAM-SHA-256 or SCRAM-SHA-512. Default: all that the user has.",
    ),
]
Iterations = Annotated[
    int,
    typer.Option(
        "--iterations",
        min=ITERATIONS_MIN,
        max=ITERATIONS_MAX,
        metavar="N",
        help="How slow a password is to try out.",
    ),
]


@app.command("list")
def show(
    users: SomeUsers = None, bootstrap: Bootstrap = BOOTSTRAP, _config: Config = None, as_json: Json = False
) -> None:
    """List users, their mechanisms and iterations: all users, or the named ones."""
    with RawClient(bootstrap) as client:
        known = _described(client, users or [])
    for user in users or []:
        if user not in known:
            raise _no_user(user)
    if as_json:
        show_json({"users": [{"user": user, "credentials": known[user]} for user in sorted(known)]})
        return
    show_table(
        ("USER", "MECHANISM", "ITERATIONS"),
        [(user, each["mechanism"], each["iterations"]) for user in sorted(known) for each in known[user]],
    )


@app.command()
def add(
    user: User,
    mechanism: Mechanism = SHA_512,
    iterations: Iterations = ITERATIONS,
    password_stdin: PasswordStdin = False,
    password_file: PasswordFile = None,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """Add a user, or another mechanism to one. Asks for the password."""
    with RawClient(bootstrap) as client:
        has = _mechanisms_of(_described(client, [user]), user)
    if taken := [each.sasl_name for each in mechanism if each in has]:
        raise Failure(
            f"user {user} has a password for {', '.join(taken)} already; "
            f"change it with `penstock users password {user}`"
        )
    password = read_password(user, from_stdin=password_stdin, file=password_file)
    _set(bootstrap, user, mechanism, password, iterations)
    _say(f"added user {user}", user, mechanism, iterations, as_json=as_json)


@app.command()
def password(
    user: User,
    mechanism: SomeMechanism = None,
    iterations: Iterations = ITERATIONS,
    password_stdin: PasswordStdin = False,
    password_file: PasswordFile = None,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """Change a user's password. Asks for the new one."""
    with RawClient(bootstrap) as client:
        has = _mechanisms_of(_described(client, [user]), user)
    wanted = _wanted(user, has, mechanism)
    new = read_password(user, from_stdin=password_stdin, file=password_file)
    _set(bootstrap, user, wanted, new, iterations)
    _say(f"changed the password of {user}", user, wanted, iterations, as_json=as_json)


@app.command()
def remove(
    users: Users,
    mechanism: SomeMechanism = None,
    yes: Yes = False,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """Remove users, or one mechanism of them. Asks first. Their ACLs stay."""
    users = list(dict.fromkeys(users))
    with RawClient(bootstrap) as client:
        known = _described(client, users)
        wanted = {user: _wanted(user, _mechanisms_of(known, user), mechanism) for user in users}
        confirm(f"Remove {', '.join(users)}?", yes=yes)
        answer = client.ask(
            AlterUserScramCredentialsRequest(
                deletions=[
                    ScramCredentialDeletion(name=user, mechanism=each)
                    for user, mechanisms in wanted.items()
                    for each in mechanisms
                ]
            )
        )
    _check(answer, "could not remove")
    if as_json:
        show_json({"removed": users})
    else:
        print(f"removed {count_text(len(users), 'user')}: {', '.join(users)}")


@app.command("bootstrap")
def prepare(
    user: User,
    data_dir: Annotated[
        str,
        typer.Option("--data-dir", metavar="DIR", help="The first data directory of a controller."),
    ] = DATA_DIR,
    mechanism: Mechanism = SHA_512,
    iterations: Iterations = ITERATIONS,
    password_stdin: PasswordStdin = False,
    password_file: PasswordFile = None,
    as_json: Json = False,
) -> None:
    """Write the first user of a new cluster into a data directory, before the first start.

    With several controllers, copy the file to the data directory of each: any of them may found the cluster.
    """
    for name in IN_USE:
        if os.path.exists(os.path.join(data_dir, name)):
            raise Failure(
                f"{data_dir} belongs to a cluster that exists; add a user to it with `penstock users add {user}`"
            )
    path = os.path.join(data_dir, FILE_NAME)
    users = {}
    if os.path.exists(path):
        try:
            with open(path, "rb") as file:
                users = first_users.decode(file.read(first_users.FILE_BYTES_MAX))
        except ValueError:
            raise Failure(f"{path} is damaged; remove it and try again") from None
    chosen = read_password(user, from_stdin=password_stdin, file=password_file)
    try:
        for each in mechanism:
            users[user, each] = first_users.credential(each, chosen, os.urandom, iterations)
    except SaslError as error:
        raise Failure(str(error)) from None
    _write(path, first_users.encode(users))
    _say(f"a cluster that begins with {path} has", user, mechanism, iterations, as_json=as_json, file=path)


def _write(path: str, data: bytes) -> None:
    """Whole or not at all, and for this user of the machine only."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    draft = f"{path}.new"
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def _described(client: RawClient, users: list[str]) -> dict[str, list[dict[str, Any]]]:
    """The credentials of users that exist."""
    names = [UserName(name=name) for name in dict.fromkeys(users)]
    answer = client.ask(DescribeUserScramCredentialsRequest(users=names or None))
    refuse(answer.error_code, answer.error_message, "could not list the users")
    known = {}
    for result in answer.results:
        if result.error_code == ErrorCode.RESOURCE_NOT_FOUND:
            continue
        refuse(result.error_code, result.error_message, f"could not list {result.user}")
        known[result.user] = [
            {"mechanism": _name(each.mechanism), "iterations": each.iterations}
            for each in result.credential_infos
        ]
    return known


def _name(mechanism: int) -> str:
    known = {each.value: each.sasl_name for each in ScramMechanism}
    return known.get(mechanism, f"mechanism {mechanism}")


def _mechanisms_of(known: dict[str, list[dict[str, Any]]], user: str) -> tuple[ScramMechanism, ...]:
    names = {each["mechanism"] for each in known.get(user, ())}
    return tuple(each for each in ScramMechanism if each.sasl_name in names)


def _wanted(
    user: str, has: tuple[ScramMechanism, ...], asked: tuple[ScramMechanism, ...] | None
) -> tuple[ScramMechanism, ...]:
    if not has:
        raise _no_user(user)
    missing = [each.sasl_name for each in asked or () if each not in has]
    if missing:
        raise Failure(f"user {user} has no password for {', '.join(missing)}")
    return asked or has


def _no_user(user: str) -> Failure:
    return Failure(f"there is no user {user}; see `penstock users list`")


def _set(
    bootstrap: Any, user: str, mechanisms: tuple[ScramMechanism, ...], password: str, iterations: int
) -> None:
    upsertions = []
    for mechanism in mechanisms:
        try:
            salt, salted = first_users.salted(mechanism, password, os.urandom, iterations)
        except SaslError as error:
            raise Failure(str(error)) from None
        upsertions.append(
            ScramCredentialUpsertion(
                name=user, mechanism=mechanism, iterations=iterations, salt=salt, salted_password=salted
            )
        )
    with RawClient(bootstrap) as client:
        answer = client.ask(AlterUserScramCredentialsRequest(upsertions=upsertions))
    _check(answer, "could not change")


def _check(answer: Any, what: str) -> None:
    failed = [each for each in answer.results if each.error_code != ErrorCode.NONE]
    if failed:
        reasons = "; ".join(f"{each.user}: {reason(each.error_code, each.error_message)}" for each in failed)
        raise Failure(f"{what} {reasons}")


def _say(
    words: str,
    user: str,
    mechanisms: tuple[ScramMechanism, ...],
    iterations: int,
    *,
    as_json: bool,
    **more: str,
) -> None:
    names = [each.sasl_name for each in mechanisms]
    if as_json:
        show_json({"user": user, "mechanisms": names, "iterations": iterations, **more})
    else:
        print(f"{words}{f' user {user}' if more else ''} ({', '.join(names)}, {iterations} iterations)")
