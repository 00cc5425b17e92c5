"""`penstock configs`: the settings of a topic or a broker, by Kafka's names.

A value has a source: the topic, the broker (set while it ran or when it was started), or Kafka's default. `unset`
removes the topic's or broker's own value, so that the next source applies.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConfigSource,
    ResourceType,
)

from penstock.cli import client
from penstock.cli.client import REQUEST_TIMEOUT_S, settle
from penstock.cli.failures import Failure, WrongUsage
from penstock.cli.options import BOOTSTRAP, Bootstrap, Config, Json, check_topic
from penstock.cli.output import show_json, show_table
from penstock.cli.settings import parse_settings

app = typer.Typer(add_completion=False, help="Show and change the settings of topics and brokers.")

SOURCES = {
    ConfigSource.DYNAMIC_TOPIC_CONFIG.value: "topic",
    ConfigSource.DYNAMIC_BROKER_CONFIG.value: "broker",
    ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG.value: "all brokers",
    ConfigSource.STATIC_BROKER_CONFIG.value: "start-up",
    ConfigSource.DEFAULT_CONFIG.value: "default",
    ConfigSource.GROUP_CONFIG.value: "group",
}

Broker = Annotated[
    int | None, typer.Option("--broker", metavar="ID", help="Use a broker's settings instead of a topic's.")
]
Words = Annotated[list[str], typer.Argument(metavar="TOPIC KEY=VALUE")]
Names = Annotated[list[str], typer.Argument(metavar="TOPIC KEY")]


@app.command()
def describe(
    topic: Annotated[str | None, typer.Argument(metavar="TOPIC", callback=check_topic)] = None,
    broker: Broker = None,
    changed: Annotated[
        bool, typer.Option("--changed", help="Only settings that differ from the default.")
    ] = False,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """Show the settings of a topic, or of a broker with --broker."""
    if (topic is None) == (broker is None):
        raise WrongUsage("name a topic, or a broker with --broker ID")
    admin = client.connect(bootstrap)
    rows: list[dict[str, Any]] = [
        {
            "name": entry.name,
            "value": entry.value,
            "source": SOURCES.get(_source(entry), "unknown"),
            "read_only": entry.is_read_only,
            "sensitive": entry.is_sensitive,
        }
        for entry in _entries(admin, _resource(admin, topic, broker))
        if not changed or _source(entry) != ConfigSource.DEFAULT_CONFIG.value
    ]
    if as_json:
        show_json(rows)
        return
    show_table(
        ("NAME", "VALUE", "SOURCE"),
        [(row["name"], "(hidden)" if row["sensitive"] else row["value"], row["source"]) for row in rows],
    )


@app.command("set")
def set_values(
    words: Words,
    broker: Broker = None,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """Set one or more settings of a topic, or of a broker with --broker. Other settings do not change."""
    topic, pairs = _split(words, broker)
    if not pairs:
        raise WrongUsage("nothing to set; name settings as KEY=VALUE, such as retention.ms=3600000")
    values = parse_settings("configs set", pairs)
    entries = [
        ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET) for key, value in values.items()
    ]
    admin = client.connect(bootstrap)
    target = _alter(admin, topic, broker, entries)
    if as_json:
        show_json({**target, "set": values})
    else:
        print(f"set {', '.join(f'{key}={value}' for key, value in values.items())}")


@app.command()
def unset(
    names: Names,
    broker: Broker = None,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """Remove settings, so that the broker's setting or the default applies again."""
    topic, keys = _split(names, broker)
    if not all(keys):
        raise WrongUsage("a setting's name must not be empty")
    if not keys:
        raise WrongUsage("nothing to unset; name the settings, such as retention.ms")
    entries = [ConfigEntry(key, None, incremental_operation=AlterConfigOpType.DELETE) for key in keys]
    admin = client.connect(bootstrap)
    target = _alter(admin, topic, broker, entries)
    if as_json:
        show_json({**target, "unset": keys})
    else:
        print(f"unset {', '.join(keys)}")


def changed_settings(admin: AdminClient, topic: str) -> dict[str, str | None]:
    """The settings made on the topic itself."""
    return {
        entry.name: entry.value
        for entry in _entries(admin, ConfigResource(ResourceType.TOPIC, topic))
        if _source(entry) == ConfigSource.DYNAMIC_TOPIC_CONFIG.value
    }


def setting(admin: AdminClient, topic: str, name: str) -> str | None:
    """The effective value of a topic's setting, from any source; None also for those who may not read settings."""
    try:
        entries = _entries(admin, ConfigResource(ResourceType.TOPIC, topic))
    except KafkaException as error:
        if client.code_of(error) != KafkaError.TOPIC_AUTHORIZATION_FAILED:
            raise
        return None
    return next((entry.value for entry in entries if entry.name == name), None)


def _split(words: list[str], broker: int | None) -> tuple[str | None, list[str]]:
    """The topic (None with --broker) and the remaining words."""
    if broker is not None:
        return None, words
    topic, *rest = words
    if "=" in topic:
        raise WrongUsage(f"name the topic first, or a broker with --broker ID; got {topic!r}")
    return check_topic(topic), rest


def _resource(admin: AdminClient, topic: str | None, broker: int | None) -> ConfigResource:
    if topic is not None:
        return ConfigResource(ResourceType.TOPIC, topic)
    # librdkafka would wait a minute for a broker that does not exist.
    brokers = settle(admin.describe_cluster(request_timeout=REQUEST_TIMEOUT_S)).nodes
    known = sorted(node.id for node in brokers)
    if broker not in known:
        raise Failure(f"there is no broker {broker}; choose from {', '.join(map(str, known))}")
    return ConfigResource(ResourceType.BROKER, str(broker))


def _entries(admin: AdminClient, resource: ConfigResource) -> list[ConfigEntry]:
    answer = admin.describe_configs([resource], request_timeout=REQUEST_TIMEOUT_S)[resource]
    try:
        return sorted(settle(answer).values(), key=lambda entry: str(entry.name))
    except KafkaException as error:
        raise _unknown_topic(admin, error, resource.name) from None


def _alter(
    admin: AdminClient, topic: str | None, broker: int | None, entries: list[ConfigEntry]
) -> dict[str, Any]:
    resource = _resource(admin, topic, broker)
    resource.incremental_configs = entries
    try:
        settle(admin.incremental_alter_configs([resource], request_timeout=REQUEST_TIMEOUT_S)[resource])
    except KafkaException as error:
        raise _unknown_topic(admin, error, resource.name) from None
    return {"topic": topic} if broker is None else {"broker": broker}


def _unknown_topic(admin: AdminClient, error: KafkaException, topic: str) -> Exception:
    return (
        client.no_topic(admin, topic) if client.code_of(error) == KafkaError.UNKNOWN_TOPIC_OR_PART else error
    )


def _source(entry: ConfigEntry) -> int:
    """librdkafka may return the bare number although the type says enum."""
    return entry.source.value if isinstance(entry.source, ConfigSource) else int(entry.source)
