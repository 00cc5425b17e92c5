"""Every API that clients may use: refused without a right, and works with exactly the rights it needs."""

from __future__ import annotations

import pytest

from penstock.broker.handlers.routes import HANDLERS
from penstock.broker.network.authorization import ResourceType
from penstock.protocol.apis import APIS, CLIENT, advertised
from penstock.protocol.errors import ErrorCode
from tests.broker.rights.rows import GROUPS, ROWS, TOPICS, TRANSACTIONAL_IDS, Row
from tests.broker.rights.scene import Needed, Scene, errors_in, produce_request

SERVED = [api.name for api in advertised(CLIENT)]
# A right on the cluster may stand for one on each topic. Without both, the error is about the topic.
ABOUT_TOPICS = {"CreateTopics"}
DENIALS = {
    ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    ErrorCode.GROUP_AUTHORIZATION_FAILED,
    ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
    ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}


class Prepared(Scene):
    def __init__(self) -> None:
        super().__init__()
        self.create(*TOPICS)
        # The files of these tests cannot be renamed, so what is deleted has none.
        for name in (name for name in TOPICS if name != "deleted"):
            assert not list(errors_in(self.admin.call(produce_request(name), 9)))
        for name in GROUPS:
            self.commit(name, "t")
        self.producers = {name: self.producer(name) for name in TRANSACTIONAL_IDS}


@pytest.fixture(scope="module")
def scene() -> Prepared:
    return Prepared()


def rows() -> list[tuple[str, Row]]:
    served = {api.name for api in APIS.values()}
    return [(name, row) for name, rows in ROWS.items() if name in served for row in rows]


def named(value: object) -> str:
    return value.name.replace(" ", "-") if isinstance(value, Row) else str(value)


@pytest.mark.parametrize("name", SERVED)
def test_every_api_that_clients_may_use_has_a_line(name: str) -> None:
    assert ROWS.get(name), f"{name}: which rights does it need? Add a row, and a line to docs/guide/acls.md"


@pytest.mark.parametrize(("name", "row"), rows(), ids=named)
def test_it_is_refused_without_a_right_and_works_with_exactly_those_it_needs(
    name: str, row: Row, scene: Prepared
) -> None:
    request = row.request(scene.producers)
    user = f"{name}-{row.name}"
    for number, missing in enumerate(row.needs):
        others = [right for right in row.needs if right != missing]
        who = f"{user}-{number}"
        scene.allow(who, *others)
        before = scene.state()
        answer = scene.client(who).call(request, row.version)
        if row.hides is not None:
            assert row.hides(answer)
            assert not list(errors_in(answer))
        else:
            assert expected(name, row, missing) in set(errors_in(answer)), (missing, answer)
        assert scene.state() == before, missing

    scene.allow(user, *row.needs)
    answer = scene.client(user).call(request, row.version)
    found = set(errors_in(answer))
    assert not found & DENIALS, answer
    if row.told is not None:
        assert found == ({row.told} if row.told else set()), answer
    if row.hides is not None:
        assert not row.hides(answer)


def expected(name: str, row: Row, missing: Needed) -> ErrorCode:
    if name in ABOUT_TOPICS:
        return ErrorCode.TOPIC_AUTHORIZATION_FAILED
    return row.denied(missing)


@pytest.mark.parametrize("name", SERVED)
def test_the_route_names_the_rights_of_the_matrix(name: str) -> None:
    (key,) = [api.key for api in APIS.values() if api.name == name]
    of_route = {(right.operation, right.resource) for right in HANDLERS[key].rights}
    of_rows = {(operation, resource) for row in ROWS[name] for operation, resource, _ in row.needs}
    # Found out by other requests: what a follower needs, and what creates topics for the whole cluster.
    more = of_route - of_rows
    assert all(resource is ResourceType.CLUSTER or resource is ResourceType.GROUP for _, resource in more)
    fewer = {right for right in of_rows - of_route if right[0].name != "DESCRIBE_CONFIGS"}
    assert not fewer
