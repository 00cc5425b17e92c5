"""The broker's settings as typed values."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from penstock.broker.config import BrokerConfig, CleanerSettings, ConfigError
from penstock.metadata.broker_settings import BROKER, OPTIONS
from penstock.metadata.image import BROKER_RESOURCE, TOPIC_RESOURCE, ConfigResource, Image, config_record
from penstock.metadata.settings import DOUBLE_MAX, LONG_MAX, Status
from tests.metadata.test_image import topic


def load(**overrides: str) -> BrokerConfig:
    config, _ = BrokerConfig.load({name.replace("_", "."): value for name, value in overrides.items()})
    return config


def error(overrides: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        BrokerConfig.load(overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults_are_kafkas() -> None:
    config, warnings = BrokerConfig.load({})
    assert warnings == []
    assert config.auto_create_topics_enable is True
    assert config.num_partitions == 1
    assert config.socket_request_max_bytes == 100 << 20
    assert config.offsets_topic_num_partitions == 50
    assert config.groups.initial_rebalance_delay_ms == 3000
    assert config.groups.offsets_retention_ms == 7 * 24 * 3600 * 1000
    assert config.static == {}


def test_what_is_set_is_typed() -> None:
    config = load(auto_create_topics_enable=" FALSE ", max_connections="12", group_max_size="7")
    assert config.auto_create_topics_enable is False
    assert config.max_connections == 12
    assert config.groups.members_max == 7
    assert config.static["max.connections"] == "12"


def test_every_attribute_is_a_setting_that_is_implemented() -> None:
    names = {field.name.replace("_", ".") for field in fields(BrokerConfig)}
    names -= {"groups", "transactions", "static", ".topics"}
    assert all(BROKER[name].status is Status.IMPLEMENTED for name in names)


def test_negative_limits_mean_none() -> None:
    config = load(connections_max_idle_ms="-1", queued_max_request_bytes="-1")
    assert config.connections_max_idle_ms == config.queued_max_request_bytes == LONG_MAX


def test_setting_without_meaning_is_accepted_with_a_warning() -> None:
    _, warnings = BrokerConfig.load({"num.io.threads": "8", "log.preallocate": "true", "num.partitions": "2"})
    assert warnings == [
        "log.preallocate has no effect: segment files grow as they are written",
        "num.io.threads has no effect: one event loop does all the work",
    ]


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        ({"log.retention.hour": "1"}, "did you mean log.retention.hours?"),
        ({"zookeeper.connect": "x"}, "there is no setting named zookeeper.connect"),
        ({"retention.ms": "1"}, "the broker's default for it is log.retention.ms"),
        ({"remote.storage.enable": "true"}, "a setting of topics, not of brokers"),
        ({"num.partitions": "many"}, "num.partitions=many: must be a whole number"),
        ({"num.partitions": "0"}, "at least 1"),
        ({"compression.type": "lz4"}, "as the producer compressed them"),
        ({"log.cleanup.policy": "compress"}, "must be made of compact, delete"),
        ({"log.cleaner.dedupe.buffer.size": "1000"}, "must be at least 1048576"),
        ({"log.cleaner.io.buffer.load.factor": "1.5"}, "must be at most 1"),
        ({"log.cleaner.io.max.bytes.per.second": "0"}, "must be at least 1"),
        (
            {"authorizer.class.name": "kafka.Acl"},
            "use org.apache.kafka.metadata.authorizer.StandardAuthorizer or",
        ),
        ({"super.users": "User:admin"}, "set authorizer.class.name=acls too"),
        ({"authorizer.class.name": "acls", "super.users": "admin"}, "write User:NAME;User:NAME; got 'admin'"),
        ({"sasl.enabled.mechanisms": "GSSAPI"}, "must be made of SCRAM-SHA-256, SCRAM-SHA-512, PLAIN"),
        ({"sasl.jaas.config": "x"}, "make users with `penstock users`"),
        ({"sasl.kerberos.service.name": "x"}, "Kerberos (GSSAPI) is not supported; use SCRAM"),
        ({"sasl.server.callback.handler.class": "x"}, "no JVM"),
        ({"controller.quorum.voters": "1@a:1"}, "single nodes"),
        ({"broker.session.timeout.ms": "2000"}, "must exceed broker.heartbeat.interval.ms"),
        ({"penstock.durability": "maybe"}, "must be one of replicated, flushed"),
        ({"group.min.session.timeout.ms": "9", "group.max.session.timeout.ms": "8"}, "exceeds"),
        ({"queued.max.request.bytes": "1000"}, "must hold a request"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_cannot_be_are_refused_in_one_helpful_line(
    overrides: dict[str, str], part: str
) -> None:
    assert part in error(overrides)


@pytest.mark.parametrize(("name", "option"), OPTIONS.items())
def test_what_has_an_option_of_its_own_is_pointed_there(name: str, option: str) -> None:
    assert error({name: "1"}) == f"{name} is set with the option {option}"


def test_refused_settings_are_accepted_with_their_default() -> None:
    _, warnings = BrokerConfig.load({"compression.type": "producer", "log.cleanup.policy": "delete"})
    assert warnings == []


def test_options_are_known_to_those_who_ask_for_the_settings() -> None:
    config, _ = BrokerConfig.load({"num.partitions": "2"}, options={"node.id": "3"})
    assert config.static == {"num.partitions": "2", "node.id": "3"}


# The file.


def test_file_is_read_with_dotted_and_quoted_names_and_set_wins(tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text(
        "num.partitions = 3\n"
        "auto.create.topics.enable = false\n"
        '"max.connections" = 5\n'
        '"max.connections.per.ip" = 2\n'
        'log.cleanup.policy = ["delete"]\n'
        "[log.retention]\nhours = 7\n"
    )
    config, warnings = BrokerConfig.load({"num.partitions": "4"}, str(file))
    assert warnings == []
    assert (config.num_partitions, config.max_connections, config.max_connections_per_ip) == (4, 5, 2)
    assert config.auto_create_topics_enable is False
    assert config.static["log.retention.hours"] == "7"


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("num.partitions 3", "penstock.toml"),
        ("max.connections = 1\nmax.connections.per.ip = 1", 'as in "max.connections" = 100'),
        ("num.partitions = 2024-01-01", "num.partitions must be a text"),
        ("a = [1]", "a must be a text"),
        ("nonsense = 1", "there is no setting named nonsense"),
        ("node.id = 1", "--node-id"),
    ],
)
def test_file_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, content: str, part: str) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        BrokerConfig.load({}, str(file))
    assert part in str(caught.value) and "\n" not in str(caught.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*missing\.toml: No such file"):
        BrokerConfig.load({}, str(tmp_path / "missing.toml"))


# Topics.


def image_with(*settings: tuple[int, str, str, str | None], on: Image | None = None) -> Image:
    if on is None:
        on, _ = Image().apply([change for id, name in enumerate("abc", 1) for change in topic(name, id)])
    image, _ = on.apply([config_record(ConfigResource(*setting[:2]), *setting[2:]) for setting in settings])
    return image


def test_topics_that_set_the_same_share_one_config() -> None:
    config = load()
    image = image_with((TOPIC_RESOURCE, "c", "retention.ms", "5"))
    a, b, c = (config.topic_config(image, 1, name) for name in "abc")
    assert a is b and a is not c
    assert (a.log.retention_ms, c.log.retention_ms) == (7 * 24 * 3600 * 1000, 5)


def test_config_is_the_same_object_until_something_changes() -> None:
    config = load()
    image = image_with()
    before = config.topic_config(image, 1, "a")
    image = image_with((TOPIC_RESOURCE, "b", "retention.ms", "5"), on=image)
    assert config.topic_config(image, 1, "a") is before
    image = image_with((BROKER_RESOURCE, "", "log.retention.ms", "6"), on=image)
    after = config.topic_config(image, 1, "a")
    assert (after.log.retention_ms, config.topic_config(image, 1, "b").log.retention_ms) == (6, 5)
    image = image_with((BROKER_RESOURCE, "", "log.retention.ms", None), on=image)
    assert config.topic_config(image, 1, "a") == before


def test_settings_of_another_broker_do_not_count() -> None:
    image = image_with((BROKER_RESOURCE, "2", "message.max.bytes", "9"))
    config = load()
    assert config.topic_config(image, 1, "a").max_message_bytes == 1_048_588
    assert config.topic_config(image, 2, "a").max_message_bytes == 9


def test_settings_become_what_log_and_partition_need() -> None:
    image = image_with(
        *(
            (TOPIC_RESOURCE, "a", name, value)
            for name, value in {
                "segment.bytes": "1000",
                "segment.ms": "2000",
                "segment.index.bytes": "3000",
                "index.interval.bytes": "4000",
                "retention.bytes": "5000",
                "message.timestamp.type": "LogAppendTime",
                "message.timestamp.before.max.ms": "6000",
                "message.timestamp.after.max.ms": "7000",
                "flush.messages": "1",
                "flush.ms": "8000",
                "file.delete.delay.ms": "9000",
                "min.insync.replicas": "2",
            }.items()
        )
    )
    made = load(producer_id_expiration_ms="10000").topic_config(image, 1, "a")
    log = made.log
    assert (log.segment_bytes, log.segment_ms, log.segment_index_bytes) == (1000, 2000, 3000)
    assert (log.index_interval_bytes, log.retention_bytes, log.producer_expiration_ms) == (4000, 5000, 10000)
    assert (made.timestamp_before_max_ms, made.timestamp_after_max_ms) == (6000, 7000)
    assert (made.flush_ms, made.file_delete_delay_ms, made.min_insync_replicas) == (8000, 9000, 2)
    assert made.is_log_append_time and made.is_flushed and made.is_delete and not made.is_compact


def test_compacted_topic_keeps_what_is_old() -> None:
    image = image_with((TOPIC_RESOURCE, "a", "cleanup.policy", "compact"))
    made = load(log_retention_bytes="1").topic_config(image, 1, "a")
    assert made.is_compact and made.log.is_compacted and not made.is_delete
    assert (made.log.retention_ms, made.log.retention_bytes) == (-1, -1)


def test_a_topic_may_be_compacted_and_lose_old_segments() -> None:
    image = image_with((TOPIC_RESOURCE, "a", "cleanup.policy", "compact,delete"))
    made = load(log_retention_bytes="1").topic_config(image, 1, "a")
    assert made.is_compact and made.log.is_compacted and made.is_delete
    assert made.log.retention_bytes == 1


def test_a_topic_without_a_policy_keeps_everything() -> None:
    image = image_with((TOPIC_RESOURCE, "a", "cleanup.policy", ""))
    made = load(log_retention_bytes="1").topic_config(image, 1, "a")
    assert not made.is_compact and not made.log.is_compacted and not made.is_delete
    assert (made.log.retention_ms, made.log.retention_bytes) == (-1, -1)


def test_settings_of_compaction_come_from_the_topic_or_else_from_the_broker() -> None:
    image = image_with(
        (TOPIC_RESOURCE, "a", "min.cleanable.dirty.ratio", "0.1"),
        (TOPIC_RESOURCE, "a", "min.compaction.lag.ms", "2"),
        (TOPIC_RESOURCE, "a", "max.compaction.lag.ms", "3"),
        (TOPIC_RESOURCE, "a", "delete.retention.ms", "4"),
    )
    config = load(
        log_cleanup_policy="compact",
        log_cleaner_min_cleanable_ratio="0.9",
        log_cleaner_min_compaction_lag_ms="20",
        log_cleaner_max_compaction_lag_ms="30",
        log_cleaner_delete_retention_ms="40",
    )
    own, shared = (config.topic_config(image, 1, name).log for name in ("a", "b"))
    assert own.is_compacted and shared.is_compacted
    assert (own.min_cleanable_dirty_ratio, shared.min_cleanable_dirty_ratio) == (0.1, 0.9)
    assert (own.min_compaction_lag_ms, shared.min_compaction_lag_ms) == (2, 20)
    assert (own.max_compaction_lag_ms, shared.max_compaction_lag_ms) == (3, 30)
    assert (own.delete_retention_ms, shared.delete_retention_ms) == (4, 40)


def test_settings_of_the_cleaner_have_kafkas_defaults() -> None:
    config = load()
    assert config.cleaner_settings(image_with(), 1) == CleanerSettings(
        is_enabled=config.log_cleaner_enable,
        backoff_ms=config.log_cleaner_backoff_ms,
        dedupe_buffer_size=config.log_cleaner_dedupe_buffer_size,
        io_buffer_load_factor=config.log_cleaner_io_buffer_load_factor,
        io_buffer_size=config.log_cleaner_io_buffer_size,
        io_max_bytes_per_second=config.log_cleaner_io_max_bytes_per_second,
    )
    assert config.cleaner_settings(image_with(), 1) == CleanerSettings(
        True, 15_000, 128 << 20, 0.9, 512 << 10, DOUBLE_MAX
    )


def test_settings_of_the_cleaner_change_while_it_runs() -> None:
    image = image_with(
        (BROKER_RESOURCE, "", "log.cleaner.io.max.bytes.per.second", "1E6"),
        (BROKER_RESOURCE, "", "log.cleaner.backoff.ms", "5"),
        (BROKER_RESOURCE, "2", "log.cleaner.backoff.ms", "7"),
    )
    config = load(log_cleaner_backoff_ms="9", log_cleaner_enable="false")
    assert config.log_cleaner_backoff_ms == 9
    assert [config.cleaner_settings(image, broker).backoff_ms for broker in (1, 2)] == [5, 7]
    assert config.cleaner_settings(image, 1).io_max_bytes_per_second == 1_000_000
    assert not config.cleaner_settings(image, 1).is_enabled


def test_more_threads_for_the_cleaner_have_no_effect() -> None:
    _, warnings = BrokerConfig.load({"log.cleaner.threads": "4"})
    assert warnings == [
        "log.cleaner.threads has no effect: one process compacts the logs, one after the other"
    ]


def test_flushed_mode_reaches_every_topic_that_does_not_say_otherwise() -> None:
    config = load(penstock_durability="flushed")
    image = image_with((TOPIC_RESOURCE, "a", "flush.messages", "10"))
    assert not config.topic_config(image, 1, "a").is_flushed
    assert config.topic_config(image, 1, "b").is_flushed


def test_start_does_not_pay_for_what_only_errors_and_files_need() -> None:
    source = (
        "import sys; from penstock.broker.config import BrokerConfig;"
        "BrokerConfig.load({'num.io.threads': '1'});"
        "print([name for name in ('difflib', 'tomllib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_passwords_are_not_in_the_text_of_a_configuration() -> None:
    given = {"ssl.key.password": "hunter2"}
    config, _ = BrokerConfig.load(given)
    assert "hunter2" not in repr(config)
