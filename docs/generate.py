"""Writes the reference pages that are made from the code: ``python docs/generate.py``.

A test compares them with the code, so they cannot fall behind it.
"""

from __future__ import annotations

from pathlib import Path

from penstock.metadata.broker_settings import BROKER
from penstock.metadata.settings import Setting, Status, documentation
from penstock.metadata.topic_settings import SYNONYMS, TOPIC
from penstock.protocol.apis import CLIENT, INTERNAL, Api, advertised

REFERENCE = Path(__file__).parent / "reference"


def settings_page() -> str:
    lines = [
        "# Settings",
        "",
        "Generated from the code by `docs/generate.py`. Names, defaults and meanings are Kafka's unless noted.",
        "Set a broker's settings with `penstock serve --set name=value` or in a TOML file (`--config`), a topic's",
        "with `penstock topics create --config name=value` or `penstock configs set`.",
        "",
        "`min.insync.replicas` is one setting for the whole cluster: when a second broker registers it is set to",
        "the value given at start, and with the third, if none was given, to 2. From then on it can be changed",
        "but not removed. Settings of the cluster (sessions, quorum, rebalancing) should be the same on every",
        "node, because any node may become the controller.",
        "",
        "Each `ssl.*` setting may also be set for one listener, as `listener.name.<name in lower case>.ssl.*`: see",
        "[tls.md](../guide/tls.md).",
        "",
        "## Of topics",
        "",
        "| Name | Default | Broker's default from | What it does |",
        "|---|---|---|---|",
    ]
    for setting in sorted(_with_meaning(TOPIC), key=lambda one: one.name):
        synonyms = ", ".join(f"`{synonym.name}`" for synonym in SYNONYMS.get(setting.name, ()))
        lines.append(f"| `{setting.name}` | {_default(setting)} | {synonyms} | {documentation(setting)} |")
    lines += [
        "",
        "## Of brokers",
        "",
        "| Name | Default | While running | What it does |",
        "|---|---|---|---|",
    ]
    for setting in sorted(_with_meaning(BROKER), key=lambda one: one.name):
        dynamic = "can be changed" if setting.is_dynamic else ""
        lines.append(f"| `{setting.name}` | {_default(setting)} | {dynamic} | {documentation(setting)} |")
    lines += ["", "## Accepted without effect", ""]
    lines += ["Kafka settings that have no effect here; setting one logs a warning.", ""]
    for setting in sorted({**BROKER, **TOPIC}.values(), key=lambda one: one.name):
        if setting.status is Status.WITHOUT_MEANING:
            lines.append(f"- `{setting.name}`: {setting.reason}.")
    return "\n".join(lines) + "\n"


def _with_meaning(settings: dict[str, Setting]) -> list[Setting]:
    return [setting for setting in settings.values() if setting.status is not Status.WITHOUT_MEANING]


def _default(setting: Setting) -> str:
    return f"`{setting.default}`" if setting.default else ""


def protocol_page() -> str:
    lines = [
        "# The Kafka protocol, as served",
        "",
        "Generated from the code by `docs/generate.py`.",
        "",
        "## To clients",
        "",
        *_api_table(advertised(CLIENT), CLIENT),
        "",
        "## Between nodes",
        "",
        "On the internal listener, where nodes also forward clients' requests, all of the above and:",
        "",
        *_api_table(
            [
                api
                for api in advertised(INTERNAL)
                if CLIENT not in api.listeners or api.version_max_on(CLIENT) < api.version_max
            ],
            INTERNAL,
        ),
    ]
    return "\n".join(lines) + "\n" + DEPARTURES


def _api_table(apis: list[Api], listener: str) -> list[str]:
    lines = ["| API | Key | Versions | Flexible from |", "|---|---|---|---|"]
    for api in apis:
        flexible = "" if api.flexible_from is None else str(api.flexible_from)
        versions = f"{api.version_min}-{api.version_max_on(listener)}"
        lines.append(f"| {api.name} | {api.key} | {versions} | {flexible} |")
    return lines


DEPARTURES = """
## Versions

Produce is advertised from version 0, because librdkafka before 2.8 stops compressing when it sees a higher
minimum (KAFKA-18659); versions below 3 are not served. An API or version that is not served closes the
connection, except ApiVersions, which answers with the range we have.

## Departures from Kafka

- **Records are not inspected on produce**, except on compacted topics. The batch's header and CRC are checked; its
  records are trusted. So a wrong largest timestamp in the header misplaces the batch in the time index, where Kafka
  would correct the header.
- **Batches for a compacted topic** have at most 200,000 records and 64 MB when they are decompressed; others are
  refused with MESSAGE_TOO_LARGE, on which Java's producer splits them. Their records must be readable and have
  offsets that count up from 0, or the batch is refused with INVALID_RECORD. Of the records without a key, a
  response names the first 1000.
- **`compression.type` must be `producer`**: batches are stored as sent.
- **A Metadata request that creates a topic waits for it** and answers with its leader. One request creates at
  most 100 topics.
- **Auto-creation does not recreate a topic that was just deleted**: not for 10 s, and not for 10 minutes for a
  client that was connected before the deletion, which is most likely still polling. Nor does it create, for 10 s,
  a topic whose creation was just refused. CreateTopics creates either at once.
- **Requests other than Produce are at most 16 MB**, whatever `socket.request.max.bytes` says, and hold at
  most 500,000 array elements.
- **Pipelined requests are handled as they arrive**, in order, and answered in order. Kafka takes the next request
  of a connection only after answering the one before.
- **Quotas are token buckets** with a burst of one second, where Kafka averages over eleven. Delays are at most
  25 s. Every broker counts the partitions that it is asked to create and delete; in Kafka the controller does. An
  ip is an address, never the name of a host. A connection of an address that connects too often waits; in Kafka it
  is closed. See [quotas.md](../guide/quotas.md).
- **A batch of an unknown producer in a log that never held a record is refused once**, with
  NOT_LEADER_OR_FOLLOWER, unless it is the producer's first. It may have overtaken the first one, or its producer
  continues in a recreated topic; then it is accepted on retry. Kafka up to 4.4 accepts it at once and may lose the
  overtaken batch; 4.5 answers out of order, which ends a librdkafka producer for good.
- **OffsetFetch waits** until the coordinator has applied all metadata committed at the time of the request, at most
  a second, so that it never returns an offset of a deleted topic.
- **Until every broker supports transactions**, transactional ids are refused by InitProducerId with
  TRANSACTIONAL_ID_AUTHORIZATION_FAILED, which every client treats as final; FindCoordinator names the broker that
  was asked.
- **Every transaction is verified**: `transaction.partition.verification.enable` has no effect. A leader repeats
  its question for up to 200 ms while the previous transaction is being ended, so that clients need not back off.
- **Identities of transactional producers** are compared with the previous one as stored, not by arithmetic on
  epochs. An earlier producer cannot abort the transaction of its successor; an answer lost before a failover is
  repeated after it. A classic producer whose transaction timed out gets the next epoch if it asks with
  InitProducerId; Kafka fences it. An EndTxn abort without a transaction (v2) goes to CompleteAbort directly.
- **A classic EndTxn is dropped if its connection is closed** by the time it is handled: it may mean an earlier
  transaction. Kafka carries it out.
- **Brokers number the markers** that they send each other, in a tagged field of WriteTxnMarkers, so that a delayed
  one does not end the next classic transaction.
- **WriteTxnMarkers on the listener for clients** only aborts, and only a transaction that is open in the partition
  with this producer epoch and that no coordinator has open (KIP-664). AddPartitionsToTxn is served to clients up
  to version 3; later versions are for brokers. ListTransactions has no pattern (version 2), and with a duration it
  lists only ids with a transaction; Kafka lists the others too. InitProducerId has no two-phase commit (version
  6).
- **Every ConsumerGroupHeartbeat is answered with UNSUPPORTED_VERSION**: groups use the classic protocol
  (`group.protocol=classic`).
- **On a listener without SASL**, SaslHandshake and SaslAuthenticate answer ILLEGAL_SASL_STATE and no mechanisms, as
  Kafka does.
- **ACLs** with an operation that the resource type does not have are refused, and so are prefixes of the cluster's
  name. Numbers without a meaning get INVALID_REQUEST; Kafka closes the connection. Without an authorizer, the APIs
  of ACLs answer SECURITY_DISABLED, as in Kafka.
- **Users** have names of at most 255 characters without control characters, and salts of at most 255 bytes. There
  can be 10,000 credentials and 10,000 ACLs; more are refused with POLICY_VIOLATION.
- **A transactional id in Produce needs the right on it**, also if no batch is transactional
  ([0032](../decisions/0032-rights-are-checked-where-the-client-talks-and-where-it-is-decided.md)).
- **SASL**: SaslHandshake 0, after which Kafka reads tokens without request headers, is answered with
  ILLEGAL_SASL_STATE. SaslAuthenticate without a handshake, and a second handshake, get ILLEGAL_SASL_STATE before
  the connection is closed; Kafka only closes it. A refused token gets SASL_AUTHENTICATION_FAILED at once,
  without the exchange of an error object (RFC 7628). When a credential is removed or replaced, the connections that
  were authenticated with it are closed; in Kafka they stay. There are no GSSAPI and no delegation tokens.
- **Listeners**: one that `advertised.listeners` does not name is advertised with the address it listens on; Kafka
  does not advertise it. A listener named like a protocol needs no entry in `listener.security.protocol.map`, even
  if others have one. Names have letters, digits, `-` and `_` only. Keystores and truststores are PEM. The settings
  are read at the start; the files are read again when they change.
- **Only topics and brokers have settings.** Groups, clients' metrics and brokers' loggers are refused with
  INVALID_REQUEST and the reason, and ListConfigResources lists none of them.
- **Features** are `metadata.version` and `kraft.version`, each at one level, `transaction.version` at 1 or 2, and
  `penstock.compaction` and `penstock.security` at 1. The controller sets the last three to their highest levels by
  itself once every registered broker supports them; UpdateFeatures can set `transaction.version` to 1 and to 2, but
  turn none off.
  Until `transaction.version` is set, the APIs of transactions are not advertised. Until `penstock.compaction` is
  set, `compact` in `cleanup.policy` or `log.cleanup.policy` is refused with INVALID_CONFIG, and nothing is
  compacted. Until `penstock.security` is set, changes of users and ACLs are refused with UNSUPPORTED_VERSION.
- **DescribeLogDirs says how far logs are compacted**, in tagged fields of our own, if the request asks for it in
  one (`penstock topics cleaning`).
- **Replicas are not moved between the disks of one broker**: AlterReplicaLogDirs is not served. A reassignment
  moves a replica to another broker.
- **`default.replication.factor` and `offsets.topic.replication.factor` are described as they apply**: unless they
  are set, as many as there are brokers, up to three.
- **Replica fetches are refused** on the listener for clients: a client cannot pose as a broker. Requests between
  nodes are served on the internal listener only.
- **Heartbeats every 3 s, sessions of 9 s** (Kafka: 2 and 9), quorum timeouts of 1 s and 0.5 s (2 and 1), leaders
  moved back after 30 s (300), replication 3 with `min.insync.replicas` 2 in clusters of three or more.
- **A broker that is cut off also stops serving reads** when its lease ends, after two thirds of a session.
- **No format step**: nodes with empty directories form a cluster when all of its controllers are running.
- **A new broker automatically gets replicas**, and the replicas of one that stays away are rebuilt elsewhere.
- **A damaged replica is discarded and fetched again**, and reported as lost by AssignReplicasToDirs.
- **Followers serve consumers that name their rack**, without a `replica.selector.class`.
- **Internal topics** cannot be created, deleted, grown or written by clients.
"""


PAGES = {"settings.md": settings_page, "protocol.md": protocol_page}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page())
