"""`penstock acls`: who may do what with topics, groups, transactional ids and the cluster (KIP-140, KIP-290)."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Annotated, Any, NamedTuple

import typer

from penstock.cli.failures import Failure, WrongUsage, near_name
from penstock.cli.options import BOOTSTRAP, Bootstrap, Config, Json, Yes
from penstock.cli.output import confirm, count_text, show_json, show_table
from penstock.cli.raw import RawClient, reason, refuse
from penstock.cli.subcommands import subcommands
from penstock.metadata.acls import (
    CLUSTER_NAME,
    WILDCARD,
    AclOperation,
    AclResource,
    Pattern,
    Permission,
)
from penstock.metadata.security import Acl
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.security import (
    AclCreation,
    CreateAclsRequest,
    DeleteAclsFilter,
    DeleteAclsRequest,
    DescribeAclsRequest,
)

app = typer.Typer(
    add_completion=False,
    cls=subcommands("list", {"create": "`penstock acls add`", "delete": "`penstock acls remove`"}),
    help="Show and change who may do what. Default command: list.",
)

TOPIC, GROUP, CLUSTER = AclResource.TOPIC, AclResource.GROUP, AclResource.CLUSTER
TRANSACTIONAL_ID = AclResource.TRANSACTIONAL_ID
# As Kafka's tool understands them.
PRODUCER = {
    TOPIC: (AclOperation.WRITE, AclOperation.DESCRIBE, AclOperation.CREATE),
    TRANSACTIONAL_ID: (AclOperation.WRITE, AclOperation.DESCRIBE),
}
CONSUMER = {TOPIC: (AclOperation.READ, AclOperation.DESCRIBE), GROUP: (AclOperation.READ,)}

Names = list[str] | None
Topics = Annotated[Names, typer.Option("--topic", metavar="TOPIC", help="A topic; '*' for all. Repeatable.")]
Groups = Annotated[
    Names, typer.Option("--group", metavar="GROUP", help="A consumer group; '*' for all. Repeatable.")
]
Transactional = Annotated[
    Names,
    typer.Option("--transactional-id", metavar="ID", help="A transactional id; '*' for all. Repeatable."),
]
Cluster = Annotated[bool, typer.Option("--cluster", help="The cluster itself.")]
Prefixed = Annotated[bool, typer.Option("--prefixed", help="The names are beginnings of names.")]
Principals = Annotated[
    Names,
    typer.Option(
        "--principal", metavar="[TYPE:]NAME", help="Such as User:alice; User:* for everybody. Repeatable."
    ),
]
Hosts = Annotated[
    Names, typer.Option("--host", metavar="ADDRESS", help="The address of clients. Repeatable. Default: all.")
]
Operations = Annotated[
    Names, typer.Option("--operation", metavar="NAME", help="Such as read, write or all. Repeatable.")
]
AllowOrDeny = Annotated[bool, typer.Option("--allow/--deny", help="What the ACL says; deny wins.")]
SomePermission = Annotated[
    bool | None, typer.Option("--allow/--deny", help="Only those. Default: both.", show_default=False)
]


class Resource(NamedTuple):
    type: AclResource
    # None: all of the type.
    name: str | None


@app.command("list")
def show(
    topic: Topics = None,
    group: Groups = None,
    transactional_id: Transactional = None,
    cluster: Cluster = False,
    prefixed: Prefixed = False,
    principal: Principals = None,
    host: Hosts = None,
    operation: Operations = None,
    allow: SomePermission = None,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """List ACLs. With a name: all that decide about it, also by a prefix or '*'.

    With --prefixed, those with exactly this prefix.
    """
    resources = _resources(topic, group, transactional_id, cluster=cluster)
    pattern = Pattern.PREFIXED if prefixed else Pattern.MATCH
    filters = _filters(resources, pattern, principal, host, operation, allow)
    with RawClient(bootstrap) as client:
        found = _found(client, filters)
    _show("acls", found, as_json=as_json)


@app.command()
def add(
    allow: AllowOrDeny = True,
    principal: Principals = None,
    operation: Operations = None,
    topic: Topics = None,
    group: Groups = None,
    transactional_id: Transactional = None,
    cluster: Cluster = False,
    prefixed: Prefixed = False,
    host: Hosts = None,
    producer: Annotated[
        bool, typer.Option("--producer", help="What a producer needs of --topic and --transactional-id.")
    ] = False,
    consumer: Annotated[
        bool, typer.Option("--consumer", help="What a consumer needs of --topic and --group.")
    ] = False,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """Allow or deny operations: every given one on every given resource, to every given principal."""
    if not principal:
        raise WrongUsage("say to whom: --principal User:NAME, or --principal 'User:*' for everybody")
    resources = _resources(topic, group, transactional_id, cluster=cluster)
    if not resources:
        raise WrongUsage("say on what: --topic, --group, --transactional-id or --cluster")
    if prefixed and any(each.name == WILDCARD for each in resources):
        raise WrongUsage("--prefixed with '*' would mean names that begin with an asterisk; omit one of them")
    if prefixed and cluster:
        raise WrongUsage("--prefixed does not go with --cluster, which has one name; use two commands")
    pairs = _pairs(resources, operation, producer=producer, consumer=consumer, allow=allow)
    hosts = [_host(text) for text in host or [WILDCARD]]
    permission = Permission.ALLOW if allow else Permission.DENY
    acls = [
        Acl(
            int(resource.type),
            resource.name or "",
            int(Pattern.PREFIXED if prefixed else Pattern.LITERAL),
            who,
            where,
            int(what),
            int(permission),
        )
        for (resource, what), who, where in product(pairs, map(_principal, principal), hosts)
    ]
    with RawClient(bootstrap) as client:
        answer = client.ask(CreateAclsRequest(creations=[_creation(acl) for acl in acls]))
    for acl, result in zip(acls, answer.results):
        refuse(result.error_code, result.error_message, f"could not add {_text(acl)}")
    _show("added", acls, as_json=as_json)


@app.command()
def remove(
    topic: Topics = None,
    group: Groups = None,
    transactional_id: Transactional = None,
    cluster: Cluster = False,
    prefixed: Prefixed = False,
    principal: Principals = None,
    host: Hosts = None,
    operation: Operations = None,
    allow: SomePermission = None,
    every: Annotated[bool, typer.Option("--all", help="All ACLs of the cluster.")] = False,
    yes: Yes = False,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """Remove the ACLs that match everything given. Asks first if there are several."""
    resources = _resources(topic, group, transactional_id, cluster=cluster)
    is_narrowed = bool(resources or principal or host or operation) or allow is not None
    if is_narrowed == every:
        raise WrongUsage(
            "--all does not go with other conditions"
            if every
            else "say which ACLs to remove, such as --topic NAME; or pass --all"
        )
    has_names = any(each.name is not None for each in resources)
    pattern = Pattern.PREFIXED if prefixed else Pattern.LITERAL if has_names else Pattern.ANY
    filters = _filters(resources, pattern, principal, host, operation, allow)
    with RawClient(bootstrap) as client:
        found = _found(client, filters)
        if not found:
            raise Failure("no ACL matches; see `penstock acls list`")
        if len(found) > 1 and not yes:
            _show("acls", found, as_json=False)
        confirm(f"Remove {count_text(len(found), 'ACL')}?", yes=yes or len(found) == 1)
        answer = client.ask(DeleteAclsRequest(filters=[DeleteAclsFilter(**each) for each in filters]))
    removed: dict[Acl, None] = {}
    for result in answer.filter_results:
        refuse(result.error_code, result.error_message, "could not remove ACLs")
        for match in result.matching_acls:
            if match.error_code != ErrorCode.NONE:
                raise Failure(f"could not remove an ACL: {reason(match.error_code, match.error_message)}")
            removed[_acl(match, match)] = None
    _show("removed", sorted(removed), as_json=as_json)


def _resources(topics: Names, groups: Names, ids: Names, *, cluster: bool) -> list[Resource]:
    named = ((TOPIC, topics), (GROUP, groups), (TRANSACTIONAL_ID, ids))
    found = [Resource(type, name) for type, names in named for name in names or ()]
    for each in found:
        if not each.name:
            raise WrongUsage(f"the name of a {each.type.name.lower().replace('_', ' ')} must not be empty")
    return found + ([Resource(CLUSTER, CLUSTER_NAME)] if cluster else [])


def _pairs(
    resources: Sequence[Resource], operations: Names, *, producer: bool, consumer: bool, allow: bool
) -> list[tuple[Resource, AclOperation]]:
    """The operations on each resource."""
    sets = [each for each, is_asked in ((PRODUCER, producer), (CONSUMER, consumer)) if is_asked]
    if not sets:
        if not operations:
            raise WrongUsage("say what: --operation NAME, or --producer or --consumer")
        return [(resource, operation) for resource in resources for operation in map(_operation, operations)]
    if operations:
        raise WrongUsage("--producer and --consumer choose the operations; omit --operation")
    if not allow:
        raise WrongUsage("--producer and --consumer only allow; deny single operations with --operation")
    types = {each.type for each in resources}
    if TOPIC not in types:
        raise WrongUsage("--producer and --consumer need --topic")
    if consumer and GROUP not in types:
        raise WrongUsage("--consumer needs --group, the group that it joins")
    pairs = {
        (resource, operation): None
        for operations_of in sets
        for resource in resources
        for operation in operations_of.get(resource.type, ())
    }
    idle = types - {resource.type for resource, _ in pairs}
    if idle:
        raise WrongUsage(
            f"--{'producer' if producer else 'consumer'} needs nothing of the given {_first(idle)}"
        )
    return list(pairs)


def _first(types: Iterable[AclResource]) -> str:
    return min(types).name.lower().replace("_", " ")


def _filters(
    resources: Sequence[Resource],
    pattern: Pattern,
    principals: Names,
    hosts: Names,
    operations: Names,
    allow: bool | None,
) -> list[dict[str, Any]]:
    """The fields of one filter for each combination of what is given."""
    permission = Permission.ANY if allow is None else Permission.ALLOW if allow else Permission.DENY
    return [
        {
            "resource_type_filter": int(resource.type),
            "resource_name_filter": resource.name,
            # The cluster has one name, whatever is asked about the others.
            "pattern_type_filter": int(Pattern.ANY if resource.type == CLUSTER else pattern),
            "principal_filter": None if who is None else _principal(who),
            "host_filter": where,
            "operation": int(AclOperation.ANY if what is None else _operation(what)),
            "permission_type": int(permission),
        }
        for resource, who, where, what in product(
            resources or [Resource(AclResource.ANY, None)],
            principals or (None,),
            hosts or (None,),
            operations or (None,),
        )
    ]


def _found(client: RawClient, filters: Iterable[dict[str, Any]]) -> list[Acl]:
    found: dict[Acl, None] = {}
    for fields in filters:
        answer = client.ask(DescribeAclsRequest(**fields))
        refuse(answer.error_code, answer.error_message, "could not list the ACLs")
        for resource in answer.resources:
            found.update((_acl(resource, each), None) for each in resource.acls)
    return sorted(found)


def _acl(resource: Any, entry: Any) -> Acl:
    return Acl(
        resource.resource_type,
        resource.resource_name,
        resource.pattern_type,
        entry.principal,
        entry.host,
        entry.operation,
        entry.permission_type,
    )


def _creation(acl: Acl) -> AclCreation:
    return AclCreation(
        resource_type=acl.resource_type,
        resource_name=acl.resource_name,
        resource_pattern_type=acl.pattern_type,
        principal=acl.principal,
        host=acl.host,
        operation=acl.operation,
        permission_type=acl.permission_type,
    )


def _principal(text: str) -> str:
    """A name without a type is a user's. Raises WrongUsage."""
    kind, colon, name = text.partition(":")
    if not text or (colon and not (kind and name)):
        raise WrongUsage(f"--principal: write TYPE:NAME, such as User:alice; got {text!r}")
    return text if colon else f"User:{text}"


def _operation(text: str) -> AclOperation:
    wanted = text.upper().replace("-", "_")
    names = [each.name for each in AclOperation if each != AclOperation.ANY]
    # As Kafka's tool writes them: DescribeConfigs.
    for name in names:
        if wanted.replace("_", "") == name.replace("_", ""):
            return AclOperation[name]
    near = near_name(wanted, names)
    hint = f"did you mean {near.lower()}?" if near else f"operations: {', '.join(names).lower()}"
    raise WrongUsage(f"--operation: there is no operation {text!r}; {hint}")


def _host(text: str) -> str:
    if text == WILDCARD:
        return text
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise WrongUsage(
            f"--host: {text!r} is not an address; names of hosts would match no client"
        ) from None


def _name_of(numbers: Any, number: int) -> str:
    """Also of a number that a newer broker knows."""
    try:
        return str(numbers(number).name)
    except ValueError:
        return str(number)


def _row(acl: Acl) -> dict[str, str]:
    return {
        "principal": acl.principal,
        "permission": _name_of(Permission, acl.permission_type),
        "operation": _name_of(AclOperation, acl.operation),
        "resource": _name_of(AclResource, acl.resource_type),
        "name": acl.resource_name,
        "pattern": _name_of(Pattern, acl.pattern_type),
        "host": acl.host,
    }


def _text(acl: Acl) -> str:
    row = _row(acl)
    return (
        f"{row['permission'].lower()} {row['operation'].lower()} on {row['resource'].lower()} {row['name']} "
        f"to {row['principal']}"
    )


def _show(what: str, acls: Sequence[Acl], *, as_json: bool) -> None:
    rows = [_row(acl) for acl in acls]
    if as_json:
        show_json({what: rows})
        return
    title = None if what == "acls" else f"{what} {count_text(len(rows), 'ACL')}"
    columns = ("principal", "permission", "operation", "resource", "name", "pattern", "host")
    show_table(
        [column.upper() for column in columns],
        [[row[column] for column in columns] for row in rows],
        title=title,
    )
