"""What clients are told and what is kept from them, the controller's own check, and the audit log."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.broker.network.audit import DENIALS_PER_WINDOW, WINDOW_MS, Audit
from penstock.broker.network.authorization import Operation, Principal, Requester, ResourceType
from penstock.metadata.authorizer import ALL, ALLOW, LITERAL, PREFIXED
from penstock.metadata.quotas import CONTROLLER_MUTATION_RATE
from penstock.metadata.security import Acl
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.groups import OffsetFetchRequest
from penstock.protocol.messages.produce import InitProducerIdRequest
from penstock.protocol.messages.topics import (
    CreatableTopic,
    CreateTopicsRequest,
    DeleteTopicsRequest,
    DeleteTopicState,
    MetadataRequest,
    MetadataRequestTopic,
)
from tests.broker.rights.rows import alter, create_topics
from tests.broker.rights.scene import Scene, errors_in, produce_request
from tests.virtual import Lines

CREATE, DELETE, DESCRIBE = Operation.CREATE, Operation.DELETE, Operation.DESCRIBE
READ, WRITE = Operation.READ, Operation.WRITE
TOPIC = ResourceType.TOPIC
DENIED = ErrorCode.TOPIC_AUTHORIZATION_FAILED


@pytest.fixture(scope="module")
def scene() -> Scene:
    scene = Scene()
    scene.create("seen", "hidden", "listed-1", "listed-2")
    return scene


@pytest.fixture
def log(scene: Scene) -> Lines:
    log = Lines()
    server = scene.world.node.client
    assert server is not None
    server.audit = Audit(log, scene.world.clock)
    return log


def test_a_topic_that_may_not_be_described_is_unknown_by_its_id(scene: Scene) -> None:
    scene.allow("ids", (DESCRIBE, TOPIC, "seen"))
    ids = [scene.broker.image.topics[name].id for name in ("seen", "hidden")]
    request = MetadataRequest(topics=[MetadataRequestTopic(name=None, topic_id=id) for id in ids])
    seen, hidden = scene.client("ids").call(request, 12).topics
    assert (seen.error_code, seen.name) == (0, "seen")
    assert (hidden.error_code, hidden.name) == (ErrorCode.UNKNOWN_TOPIC_ID, None)


def test_whether_a_topic_exists_is_kept_from_those_who_may_not_describe_it(scene: Scene) -> None:
    request = MetadataRequest(
        topics=[MetadataRequestTopic(name=name) for name in ("hidden", "nowhere")],
        allow_auto_topic_creation=False,
    )
    answer = scene.client("stranger").call(request, 9)
    assert [topic.error_code for topic in answer.topics] == [DENIED, DENIED]


@pytest.mark.parametrize("version", [1, 9, 12])
def test_the_list_of_all_topics_has_those_that_may_be_described(scene: Scene, version: int) -> None:
    user = f"lister-{version}"
    scene.add(Acl(TOPIC, "listed-", PREFIXED, f"User:{user}", "*", READ, ALLOW))
    request = MetadataRequest(topics=None, include_topic_authorized_operations=version >= 8)
    answer = scene.client(user).call(request, version)
    assert [topic.name for topic in answer.topics] == ["listed-1", "listed-2"]
    assert [len(topic.partitions) for topic in answer.topics] == [1, 1]
    if version >= 8:
        expected = 1 << READ | 1 << DESCRIBE
        assert {topic.topic_authorized_operations for topic in answer.topics} == {expected}


def test_the_settings_of_a_new_topic_need_a_right_of_their_own(scene: Scene) -> None:
    scene.allow("creator", (CREATE, TOPIC, "plain"), (CREATE, TOPIC, "shown"))
    scene.allow("creator", (Operation.DESCRIBE_CONFIGS, TOPIC, "shown"))
    client = scene.client("creator")
    (plain,) = client.call(create_topics("plain"), 7).topics
    (shown,) = client.call(create_topics("shown"), 7).topics
    assert plain.error_code == shown.error_code == shown.topic_config_error_code == 0
    assert (plain.topic_config_error_code, plain.num_partitions, plain.configs) == (DENIED, -1, [])
    assert shown.num_partitions == 1
    assert shown.configs


def test_what_is_refused_is_told_beside_what_is_done(scene: Scene) -> None:
    scene.allow("half", (CREATE, TOPIC, "half"))
    request = CreateTopicsRequest(
        topics=[
            CreatableTopic(name=name, num_partitions=1, replication_factor=1)
            for name in ("half", "other", "__consumer_offsets")
        ]
    )
    told = {topic.name: topic.error_code for topic in scene.client("half").call(request, 4).topics}
    assert told == {
        "half": ErrorCode.NONE,
        "other": DENIED,
        "__consumer_offsets": ErrorCode.INVALID_TOPIC_EXCEPTION,
    }
    assert "other" not in scene.broker.image.topics


def test_the_name_behind_an_id_is_not_told_when_it_is_not_deleted(scene: Scene) -> None:
    scene.allow("deleter", (DESCRIBE, TOPIC, "seen"))
    topics = scene.broker.image.topics
    request = DeleteTopicsRequest(
        topics=[DeleteTopicState(name=None, topic_id=topics[name].id) for name in ("seen", "hidden")]
    )
    answer = scene.client("deleter").call(request, 6)
    assert {result.name for result in answer.responses} == {"seen", None}
    assert [result.error_code for result in answer.responses] == [DENIED, DENIED]
    assert {"seen", "hidden"} <= scene.broker.image.topics.keys()


def test_all_offsets_of_a_group_are_those_of_topics_that_may_be_described(scene: Scene) -> None:
    scene.commit("offsets", "seen")
    scene.commit("offsets", "hidden")
    scene.allow("reader", (DESCRIBE, ResourceType.GROUP, "offsets"), (DESCRIBE, TOPIC, "seen"))
    answer = scene.client("reader").call(OffsetFetchRequest(group_id="offsets", topics=None), 7)
    assert [topic.name for topic in answer.topics] == ["seen"]


def test_who_may_write_to_some_topic_gets_a_producer_id(scene: Scene) -> None:
    request = InitProducerIdRequest(transactional_id=None)
    assert scene.client("writer").call(request, 4).error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    scene.add(Acl(TOPIC, "any-", PREFIXED, "User:writer", "*", WRITE, ALLOW))
    assert scene.client("writer").call(request, 4).error_code == ErrorCode.NONE


def test_super_users_and_all_operations_need_no_more(scene: Scene) -> None:
    assert not list(errors_in(scene.client("CN=other").call(produce_request("seen"), 9)))
    scene.add(Acl(TOPIC, "seen", LITERAL, "User:all", "*", ALL, ALLOW))
    assert not list(errors_in(scene.client("all").call(produce_request("seen"), 9)))


def test_the_controller_checks_who_asked_by_its_own_image(scene: Scene) -> None:
    """A broker that forwards may not know yet that a right was taken away."""
    scene.allow("forwarded", (CREATE, TOPIC, "by-controller"))
    answers: list[Any] = []

    def ask(user: str | None, name: str) -> int:
        answers.clear()
        requester = None if user is None else Requester(Principal("User", user), "10.0.0.1")
        scene.broker.active_controller.handle(
            create_topics(name), 7, answers.append, from_broker=True, requester=requester
        )
        scene.world.run_until(lambda: bool(answers), 5_000)
        error: int = answers[0].topics[0].error_code
        return error

    assert ask("nobody", "by-controller") == DENIED
    assert ask("forwarded", "other") == DENIED
    assert "by-controller" not in scene.broker.image.topics
    assert ask("forwarded", "by-controller") == ErrorCode.NONE
    assert ask(None, "by-a-node") == ErrorCode.NONE


def test_the_audit_log_says_who_was_denied_what(scene: Scene, log: Lines) -> None:
    scene.client("mallory").call(produce_request("seen"), 9)
    assert log.lines == [
        (
            "denied",
            {
                "principal": "User:mallory",
                "host": "10.1.2.3",
                "api": "Produce",
                "operation": "WRITE",
                "resource": "TOPIC",
                "name": "seen",
            },
        )
    ]


def test_the_audit_log_has_each_administrative_request_without_values(scene: Scene, log: Lines) -> None:
    scene.admin.call(alter(2, "seen", "retention.ms"), 1)
    scene.client("mallory").call(alter(2, "seen", "retention.ms"), 1)
    done = [values for event, values in log.lines if event == "administered"]
    assert [(line["principal"], line["subject"], line["result"]) for line in done] == [
        ("User:admin", "seen (retention.ms)", "OK"),
        ("User:mallory", "seen (retention.ms)", "TOPIC_AUTHORIZATION_FAILED"),
    ]
    assert "20000" not in str(log.lines)


def test_what_nobody_asked_for_by_name_is_no_denial(scene: Scene, log: Lines) -> None:
    scene.client("stranger").call(MetadataRequest(topics=None), 9)
    assert log.lines == []


def test_denials_do_not_fill_the_log_and_their_names_do_not_break_it(scene: Scene, log: Lines) -> None:
    client = scene.client("mallory")
    for _ in range(DENIALS_PER_WINDOW + 5):
        client.call(produce_request("x\n\x1b[2J"), 9)
    assert len(log.lines) == DENIALS_PER_WINDOW
    assert {values["name"] for _, values in log.lines} == {"'x\\n\\x1b[2J'"}
    scene.world.run_for(WINDOW_MS)
    client.call(produce_request("x"), 9)
    assert log.lines[-2] == ("not all denials were logged", {"count": 5})


def test_administrative_requests_that_are_denied_do_not_fill_the_log(scene: Scene, log: Lines) -> None:
    client = scene.client("flooder")
    for _ in range(DENIALS_PER_WINDOW + 50):
        client.call(create_topics("none-of-yours"), 7)
    assert len(log.lines) <= 2 * DENIALS_PER_WINDOW
    # What is done in part is always there: nobody hides it behind many denials.
    scene.allow("flooder", (CREATE, TOPIC, "made"))
    made = CreateTopicsRequest(
        topics=[
            CreatableTopic(name=name, num_partitions=1, replication_factor=1)
            for name in ("made", "none-of-yours")
        ]
    )
    client.call(made, 7)
    event, values = log.lines[-1]
    assert (event, values["subject"]) == ("administered", "made, none-of-yours")


@pytest.mark.parametrize("version", [4, 5])
def test_the_delay_of_a_quota_does_not_tell_whether_a_topic_exists(scene: Scene, version: int) -> None:
    scene.broker.throttling.apply({(("user", "curious"),): {CONTROLLER_MUTATION_RATE: 0.01}})
    client = scene.client("curious")
    for name in ("hidden", "listed-1", "none", "none"):
        answer = client.call(DeleteTopicsRequest(topic_names=[name]), version)
        assert set(errors_in(answer)) == {DENIED}
        assert answer.throttle_time_ms == 0
    for _ in range(3):
        answer = client.call(create_topics("none-of-yours"), 7)
        assert set(errors_in(answer)) == {DENIED}, "clients would try again after another error"
    scene.broker.throttling.apply({})
