"""The broker settings: set on the command line, in a file or, the dynamic ones, by AlterConfigs.

Names, types, limits and defaults are those of Kafka 4.3 unless a comment says otherwise. Every setting of a Kafka
broker is known here, so that an existing configuration can be tried: settings without effect are accepted with a
warning, and settings that would be dangerous to ignore (anything about security) are refused. The defaults of
topics (``log.segment.bytes`` and the like) are generated from ``topic_settings.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.metadata.sasl_settings import NO_JAAS, NO_KERBEROS, SASL, SASL_OF_BROKER
from penstock.metadata.settings import (
    DOUBLE_MAX,
    INT_MAX,
    LONG_MAX,
    Kind,
    Setting,
    Status,
    boolean,
    double,
    dynamic,
    integer,
    long,
    refused,
    short,
    string,
    strings,
    table,
    without_meaning,
)
from penstock.metadata.ssl_settings import SSL
from penstock.metadata.topic_settings import DURABILITY, FLUSHED, NO_TIERS, REPLICATED, SYNONYMS, TOPIC
from penstock.protocol.listeners import NODES

_NO_SUCH_SASL = "this setting of SASL is not supported"
_ONLY_SECURITY_PER_LISTENER = (
    "only the settings of TLS and SASL, listener.name.<name>.ssl.* and .sasl.*, can differ between listeners"
)
_NO_TWO_PHASES = "two-phase commit is not implemented yet"
_NO_JAVA = "there is no JVM to load a class into"

AUTHORIZER = "authorizer.class.name"
STANDARD_AUTHORIZER = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
# A class, or the short name of ours.
AUTHORIZERS = ("", STANDARD_AUTHORIZER, "acls")
SUPER_USERS = "super.users"

# Settings that Kafka does not have.
REBALANCE = "penstock.rebalance.enable"
REBALANCE_DELAY_MS = "penstock.rebalance.delay.ms"
REBALANCE_PARTITIONS_MAX = "penstock.rebalance.partitions.max"
REBUILD_DELAY_MS = "penstock.replica.rebuild.delay.ms"
INTERNAL_SECURITY = "penstock.internal.security"
INTERNAL_SECRET_FILE = "penstock.internal.secret.file"
NODE_PRINCIPALS = "penstock.node.principals"

# Settings with an option of ``penstock serve``; only the option can set them.
OPTIONS = {
    "node.id": "--node-id",
    "broker.id": "--node-id",
    "broker.rack": "--rack",
    "log.dir": "--data-dir",
    "log.dirs": "--data-dir",
}
# Settings for which an option is only the short form. Only one of both may be given.
SHORT_FORMS = {"listeners": "--listen", "advertised.listeners": "--advertise"}
LISTENER_PREFIX = "listener.name."


def _topic_defaults() -> Iterator[Setting]:
    """The broker settings that are the defaults of topic settings and have the same unit."""
    for name, synonyms in SYNONYMS.items():
        # As in Kafka, the best synonym is dynamic; if there are several synonyms, the last one has the default.
        has_own_default = len(synonyms) == 1 or name == "flush.messages"
        topic = TOPIC[name]
        yield topic._replace(
            name=synonyms[0].name, default=topic.default if has_own_default else None, is_dynamic=True
        )


# Reason -> the settings it applies to.
_WITHOUT_MEANING = {
    "one event loop does all the work": """
        background.threads delete.records.purgatory.purge.interval.requests
        fetch.purgatory.purge.interval.requests group.coordinator.append.linger.ms
        group.coordinator.background.threads group.coordinator.cached.buffer.max.bytes
        group.coordinator.threads num.io.threads num.network.threads num.recovery.threads.per.data.dir
        num.replica.alter.log.dirs.threads offsets.load.buffer.size producer.purgatory.purge.interval.requests
        queued.max.requests share.fetch.purgatory.purge.interval.requests""",
    "these sizes and times are fixed": """
        controller.quorum.append.linger.ms controller.quorum.election.backoff.max.ms
        controller.quorum.fetch.max.bytes controller.quorum.fetch.snapshot.max.bytes
        controller.quorum.request.timeout.ms controller.quorum.retry.backoff.ms controller.socket.timeout.ms
        initial.broker.registration.timeout.ms log.dir.failure.timeout.ms
        replica.socket.receive.buffer.bytes replica.socket.timeout.ms request.timeout.ms
        socket.connection.setup.timeout.max.ms socket.connection.setup.timeout.ms""",
    "rates are measured over one second": """
        alter.log.dirs.replication.quota.window.num alter.log.dirs.replication.quota.window.size.seconds
        replication.quota.window.num replication.quota.window.size.seconds""",
    "a broker that stops always moves its leaderships first": "controlled.shutdown.enable",
    "voters are added with `penstock quorum add`": "controller.quorum.auto.join.enable",
    "the listener for other nodes is always the first": "early.start.listeners",
    "use `penstock serve --roles`": "process.roles",
    "high watermarks are saved with the recovery points": "replica.high.watermark.checkpoint.interval.ms",
    "a consumer with a rack is always sent to a replica in it": "replica.selector.class",
    "the operating system's defaults are used": """
        socket.listen.backlog.size socket.receive.buffer.bytes socket.send.buffer.bytes""",
    "one process compacts the logs, one after the other": "log.cleaner.threads",
    "start offsets are saved with the recovery points": "log.flush.start.offset.checkpoint.interval.ms",
    "snapshots and segments of the metadata log have fixed sizes": """
        metadata.log.max.record.bytes.between.snapshots metadata.log.max.snapshot.interval.ms
        metadata.log.segment.bytes metadata.log.segment.ms metadata.max.idle.interval.ms
        metadata.max.retention.bytes metadata.max.retention.ms""",
    "a partition of a transaction is always verified": "transaction.partition.verification.enable",
    "a refused partition is asked for again after a short, fixed time": """
        add.partitions.to.txn.retry.backoff.max.ms add.partitions.to.txn.retry.backoff.ms""",
    "the log of transactions is read in fixed portions": "transaction.state.log.load.buffer.size",
    "only the classic group protocol is implemented": """
        group.consumer.assignment.interval.ms group.consumer.assignors group.consumer.heartbeat.interval.ms
        group.consumer.max.assignment.interval.ms group.consumer.max.heartbeat.interval.ms
        group.consumer.max.session.timeout.ms group.consumer.max.size group.consumer.migration.policy
        group.consumer.min.assignment.interval.ms group.consumer.min.heartbeat.interval.ms
        group.consumer.min.session.timeout.ms group.consumer.session.timeout.ms
        group.coordinator.rebalance.protocols group.share.assignment.interval.ms group.share.assignors
        group.share.delivery.count.limit group.share.heartbeat.interval.ms
        group.share.max.assignment.interval.ms group.share.max.delivery.count.limit
        group.share.max.heartbeat.interval.ms group.share.max.partition.max.record.locks
        group.share.max.record.lock.duration.ms group.share.max.session.timeout.ms
        group.share.max.share.sessions group.share.max.size group.share.min.assignment.interval.ms
        group.share.min.delivery.count.limit group.share.min.heartbeat.interval.ms
        group.share.min.partition.max.record.locks group.share.min.record.lock.duration.ms
        group.share.min.session.timeout.ms group.share.partition.max.record.locks
        group.share.record.lock.duration.ms group.share.session.timeout.ms
        group.streams.assignment.interval.ms group.streams.heartbeat.interval.ms
        group.streams.initial.rebalance.delay.ms group.streams.max.assignment.interval.ms
        group.streams.max.heartbeat.interval.ms group.streams.max.session.timeout.ms group.streams.max.size
        group.streams.max.standby.replicas group.streams.min.assignment.interval.ms
        group.streams.min.heartbeat.interval.ms group.streams.min.session.timeout.ms
        group.streams.num.standby.replicas group.streams.session.timeout.ms
        share.coordinator.append.linger.ms share.coordinator.cached.buffer.max.bytes
        share.coordinator.load.buffer.size share.coordinator.snapshot.update.records.per.snapshot
        share.coordinator.state.topic.compression.codec share.coordinator.state.topic.min.isr
        share.coordinator.state.topic.num.partitions share.coordinator.state.topic.replication.factor
        share.coordinator.state.topic.segment.bytes share.coordinator.threads
        share.coordinator.write.timeout.ms""",
    NO_TIERS: """
        follower.fetch.last.tiered.offset.enable
        remote.fetch.max.wait.ms remote.list.offsets.request.timeout.ms
        remote.log.index.file.cache.total.size.bytes remote.log.manager.copier.thread.pool.size
        remote.log.manager.copy.max.bytes.per.second remote.log.manager.copy.quota.window.num
        remote.log.manager.copy.quota.window.size.seconds remote.log.manager.expiration.thread.pool.size
        remote.log.manager.fetch.max.bytes.per.second remote.log.manager.fetch.quota.window.num
        remote.log.manager.fetch.quota.window.size.seconds remote.log.manager.follower.thread.pool.size
        remote.log.manager.task.interval.ms remote.log.manager.thread.pool.size
        remote.log.metadata.custom.metadata.max.bytes remote.log.metadata.manager.class.name
        remote.log.metadata.manager.class.path remote.log.metadata.manager.impl.prefix
        remote.log.metadata.manager.listener.name remote.log.reader.max.pending.tasks
        remote.log.reader.threads remote.log.storage.manager.class.name
        remote.log.storage.manager.class.path remote.log.storage.manager.impl.prefix""",
    "offset commits are stored like any other batch": """
        offsets.commit.timeout.ms offsets.topic.compression.codec""",
    "quotas are token buckets with a burst of one second": """
        controller.quota.window.num controller.quota.window.size.seconds quota.window.num
        quota.window.size.seconds""",
    "delegation tokens are not implemented": """
        delegation.token.expiry.check.interval.ms delegation.token.expiry.time.ms
        delegation.token.max.lifetime.ms""",
    "there are no metrics reporters": """
        kafka.metrics.polling.interval.secs kafka.metrics.reporters metric.reporters metrics.num.samples
        metrics.recording.level metrics.sample.window.ms telemetry.max.bytes""",
    "values are used literally": "config.providers",
    "metadata is kept in the first data directory": "metadata.log.dir",
    "new partitions may go to any data directory": "cordoned.log.dirs",
    "connections are limited by number, not by rate": "max.connection.creation.rate",
}

BROKER: dict[str, Setting] = table(
    # Topics.
    boolean("auto.create.topics.enable", True, "Whether a request for a missing topic creates it."),
    boolean("delete.topic.enable", True, "Whether topics can be deleted."),
    integer("num.partitions", 1, "Partitions of a topic created without a number of partitions.", 1),
    integer(
        "default.replication.factor",
        1,
        "Replicas of a topic created without a replication factor; if not set, the number of brokers, at most 3.",
        1,
    ),
    string(
        DURABILITY,
        REPLICATED,
        "When a write is committed: on its replicas (replicated), or when they have flushed it too (flushed).",
        *(REPLICATED, FLUSHED),
    ),
    *_topic_defaults(),
    integer("log.roll.hours", 168, "log.roll.ms in hours.", 1),
    integer("log.roll.jitter.hours", 0, "log.roll.jitter.ms in hours.", 0),
    integer("log.retention.hours", 168, "log.retention.ms in hours.", -1),
    integer("log.retention.minutes", None, "log.retention.ms in minutes.", -1),
    # Housekeeping.
    long("log.retention.check.interval.ms", 300_000, "How often to look for expired segments.", 1),
    long("log.flush.scheduler.interval.ms", LONG_MAX, "How often to check logs for flush.ms.", 1),
    integer("log.flush.offset.checkpoint.interval.ms", 60_000, "How often to save recovery points.", 1),
    # Compaction.
    boolean("log.cleaner.enable", True, "Whether logs are compacted; without it compacted topics only grow."),
    *dynamic(
        # Kafka allows 0, which would never rest.
        long("log.cleaner.backoff.ms", 15_000, "How long to wait if there is nothing to compact.", 1),
        # Kafka states no limits for the next three, but refuses a smaller buffer, too.
        long(
            "log.cleaner.dedupe.buffer.size",
            128 << 20,
            "Bytes of memory for the keys of a log while it is compacted; more keys than fit take several passes.",
            1 << 20,
        ),
        double("log.cleaner.io.buffer.load.factor", 0.9, "How full the memory for keys may become.", 0.01, 1),
        double(
            "log.cleaner.io.max.bytes.per.second",
            DOUBLE_MAX,
            "Bytes per second that compaction may read and write.",
            1,
        ),
        integer(
            "log.cleaner.io.buffer.size", 512 << 10, "Bytes of memory for reading and writing segments.", 0
        ),
    ),
    *dynamic(integer("producer.id.expiration.ms", 86_400_000, "How long an idle producer is remembered.", 1)),
    # Connections and requests.
    *dynamic(
        integer("max.connections", INT_MAX, "Maximum number of open connections.", 0),
        integer("max.connections.per.ip", INT_MAX, "Maximum number of open connections from one address.", 0),
    ),
    long(
        "connections.max.idle.ms", 600_000, "The idle time after which a connection is closed; -1: never.", -1
    ),
    integer("socket.request.max.bytes", 100 << 20, "The largest request accepted.", 1),
    # Kafka has no limit by default; here one process holds every request in memory.
    long("queued.max.request.bytes", 256 << 20, "Bytes of requests in progress above which reading stops."),
    integer("fetch.max.bytes", 55 << 20, "The largest fetch response.", 1024),
    integer("max.incremental.fetch.session.cache.slots", 1000, "Maximum number of fetch sessions.", 0),
    integer(
        "max.request.partition.size.limit", 2000, "Partitions in one DescribeTopicPartitions response.", 1
    ),
    # Groups and their offsets.
    integer("group.initial.rebalance.delay.ms", 3000, "How long a new group waits for more members.", 0),
    integer("group.min.session.timeout.ms", 6000, "The shortest session timeout a member may ask for.", 1),
    integer(
        "group.max.session.timeout.ms", 1_800_000, "The longest session timeout a member may ask for.", 1
    ),
    integer("group.max.size", INT_MAX, "Maximum number of members in a group.", 1),
    integer("offset.metadata.max.bytes", 4096, "The longest metadata of a committed offset.", 0),
    integer("offsets.retention.minutes", 10_080, "How long a group without members keeps its offsets.", 1),
    long("offsets.retention.check.interval.ms", 600_000, "How often to look for expired offsets.", 1),
    integer("offsets.topic.num.partitions", 50, "Partitions of the topic of committed offsets.", 1),
    # Kafka's default is three, which is not possible on a single node.
    short(
        "offsets.topic.replication.factor",
        1,
        "Replicas of the topic of committed offsets; if not set, as many as other topics have.",
        1,
    ),
    integer("offsets.topic.segment.bytes", 100 << 20, "Segment size of the topic of committed offsets.", 14),
    # Transactions.
    integer("transaction.max.timeout.ms", 900_000, "The longest timeout that a producer may ask for.", 1),
    integer(
        "transactional.id.expiration.ms", 604_800_000, "How long an unused transactional id is remembered.", 1
    ),
    integer(
        "transaction.abort.timed.out.transaction.cleanup.interval.ms",
        10_000,
        "How often to look for transactions that are open too long.",
        1,
    ),
    integer(
        "transaction.remove.expired.transaction.cleanup.interval.ms",
        3_600_000,
        "How often to look for expired transactional ids.",
        1,
    ),
    integer("transaction.state.log.num.partitions", 50, "Partitions of the topic of transactions.", 1),
    # Kafka's defaults are three and two, which is not possible on a single node.
    short(
        "transaction.state.log.replication.factor",
        1,
        "Replicas of the topic of transactions; if not set, as many as other topics have.",
        1,
    ),
    integer(
        "transaction.state.log.min.isr",
        1,
        "In-sync replicas of the topic of transactions; if not set, as many as other topics need.",
        1,
    ),
    integer(
        "transaction.state.log.segment.bytes", 100 << 20, "Segment size of the topic of transactions.", 14
    ),
    # The cluster. Sessions and timeouts are the specification's.
    integer(
        "broker.heartbeat.interval.ms", 3000, "How often a broker sends a heartbeat to the controller.", 1
    ),
    integer(
        "broker.session.timeout.ms", 9000, "The time without a heartbeat after which a broker is fenced.", 1
    ),
    integer("controller.quorum.election.timeout.ms", 500, "How long a candidate waits for votes.", 0),
    integer(
        "controller.quorum.fetch.timeout.ms",
        1000,
        "The time without a response of the controller after which another is elected.",
        0,
    ),
    long("replica.lag.time.max.ms", 30_000, "How long a replica may lag before it leaves the ISR.", 1),
    *dynamic(
        integer("num.replica.fetchers", 1, "Connections a broker uses to fetch from another broker.", 1)
    ),
    integer("replica.fetch.max.bytes", 1 << 20, "Maximum bytes per partition in a follower's fetch.", 0),
    integer("replica.fetch.response.max.bytes", 10 << 20, "Maximum bytes in a follower's fetch.", 0),
    integer("replica.fetch.min.bytes", 1, "Bytes that a follower's fetch waits for.", 0),
    integer("replica.fetch.wait.max.ms", 500, "How long a follower's fetch waits.", 0),
    integer("replica.fetch.backoff.ms", 1000, "The longest pause after a failed fetch of a follower.", 0),
    *dynamic(
        long(
            "follower.replication.throttled.rate",
            LONG_MAX,
            "Bytes per second that a broker may copy into replicas that a reassignment adds to it, all together.",
            1,
        )
    ),
    # Kafka's reassignment tool sets both to the same number.
    *without_meaning(
        "only followers are throttled (follower.replication.throttled.rate)",
        *dynamic(
            long(
                "leader.replication.throttled.rate",
                LONG_MAX,
                "Bytes per second that leaders may send to throttled replicas.",
                1,
            )
        ),
    ),
    boolean("auto.leader.rebalance.enable", True, "Whether leaderships return to the preferred replica."),
    # Kafka's default is 300 s, which is a long time for one broker to do the work of two.
    long(
        "leader.imbalance.check.interval.seconds",
        30,
        "How often leaderships return to preferred replicas.",
        1,
    ),
    boolean(REBALANCE, True, "Whether a broker that joins automatically gets its share of the replicas."),
    long(REBALANCE_DELAY_MS, 10_000, "The delay of a rebalance after the last broker joined.", 0),
    integer(REBALANCE_PARTITIONS_MAX, 50, "Maximum number of partitions moved at the same time.", 1),
    long(
        REBUILD_DELAY_MS,
        600_000,
        "How long a broker is away before its replicas are rebuilt on other brokers; -1: never.",
        -1,
    ),
    # Set by options of the command.
    integer("node.id", None, "The id of this node, unique in its cluster.", 0),
    integer("broker.id", None, "Kafka's old name for node.id."),
    string("broker.rack", None, "The rack of this node; replicas are spread over racks."),
    string("log.dir", None, "A single log.dirs."),
    string("log.dirs", None, "The directories that hold the logs."),
    # The addresses of clients. Kafka listens on every interface by default.
    strings(
        "listeners",
        "PLAINTEXT://127.0.0.1:9092",
        "The addresses that clients connect to, each with the name of its listener; --listen is the short form.",
    ),
    strings(
        "advertised.listeners",
        None,
        "The addresses that the broker gives to clients, by listener; if not set, those of listeners.",
    ),
    # Kafka's default has an entry for each protocol, which is always there in effect.
    string(
        "listener.security.protocol.map",
        "",
        "The protocol of each listener, as in TLS:SSL. A listener with the name of a protocol needs no entry.",
    ),
    *SSL.values(),
    *SASL.values(),
    *SASL_OF_BROKER.values(),
    # Between nodes, with listener.security.protocol.map=INTERNAL:SSL, SASL_SSL or SASL_PLAINTEXT.
    string(
        INTERNAL_SECURITY,
        "required",
        "Whether nodes connect securely and accept nothing else (required), connect securely (preferred), or only"
        " accept it (accepted); the last two are for rolling restarts.",
        *("required", "preferred", "accepted"),
    ),
    string(
        INTERNAL_SECRET_FILE,
        None,
        "With INTERNAL:SASL_SSL or SASL_PLAINTEXT: the file with the secret that all nodes share.",
    ),
    string(
        NODE_PRINCIPALS,
        None,
        "With INTERNAL:SSL: the principals of the nodes' certificates, separated by semicolons; *: all that the"
        " internal listener's own truststore vouches for.",
    ),
    # Kafka takes the last two from the same file, but they are settings of its authorizer.
    string(
        AUTHORIZER,
        "",
        f"Who decides what clients may do. With {STANDARD_AUTHORIZER}, or acls for short, the ACLs of the"
        " cluster do; if not set, every client may do everything. Set it on every node, controllers too.",
    ),
    string(
        SUPER_USERS, "", "The principals that may do everything, separated by semicolons, as in User:admin."
    ),
    boolean("allow.everyone.if.no.acl.found", False, "Whether a resource without ACLs is open to everybody."),
    # Settings that must not be ignored.
    *refused(
        "max.connections.per.ip is the same for all addresses",
        string("max.connections.per.ip.overrides", "", "Other limits for some addresses."),
    ),
    *refused(NO_TIERS, boolean("remote.log.storage.system.enable", False, "Whether logs may be tiered.")),
    *refused(_NO_TWO_PHASES, boolean("transaction.two.phase.commit.enable", False, "Two-phase commit.")),
    *refused(
        "use --controllers and --internal of `penstock serve`; single nodes need neither",
        string("controller.listener.names", None, "The listeners of the metadata quorum."),
        string("controller.quorum.bootstrap.servers", None, "Where to find the metadata quorum."),
        string("controller.quorum.voters", None, "The members of the metadata quorum."),
        string("inter.broker.listener.name", None, "The listener for connections between brokers."),
    ),
    *refused(
        _NO_JAVA,
        string("alter.config.policy.class.name", None, "A class that validates changes of settings."),
        string("client.quota.callback.class", None, "A class that computes quotas."),
        string("create.topic.policy.class.name", None, "A class that validates new topics."),
    ),
    *refused(
        "there are no delegation tokens",
        string("delegation.token.secret.key", None, "The key that signs delegation tokens."),
    ),
    *refused(
        _NO_JAVA,
        string("principal.builder.class", None, "A class that determines the user of a connection."),
        string("security.providers", None, "Java security providers."),
    ),
    *refused(
        "the listener for nodes is INTERNAL; set listener.security.protocol.map=INTERNAL:SSL",
        string(
            "security.inter.broker.protocol", NODES.security_protocol.name, "The protocol between brokers."
        ),
    ),
    *(
        setting
        for reason, names in _WITHOUT_MEANING.items()
        for setting in without_meaning(
            reason, *(Setting(name, Kind.STRING, None, "") for name in names.split())
        )
    ),
)


def find(name: str) -> Setting | None:
    """The broker setting with this name, including families of names that the table does not list."""
    setting = BROKER.get(name)
    if setting is not None:
        return setting
    of_listener = (
        name.removeprefix(LISTENER_PREFIX).partition(".")[2] if name.startswith(LISTENER_PREFIX) else ""
    )
    per_listener = SSL.get(of_listener) or SASL.get(of_listener)
    if per_listener is not None:
        return per_listener._replace(name=name)
    # In Kafka also per mechanism: listener.name.NAME.scram-sha-256.sasl.jaas.config.
    if of_listener.endswith("sasl.jaas.config"):
        reason = NO_JAAS
    elif name.startswith("sasl.kerberos.") or of_listener.startswith("sasl.kerberos."):
        reason = NO_KERBEROS
    elif name.startswith("sasl.") or of_listener.startswith("sasl."):
        reason = _NO_SUCH_SASL
    elif name.startswith(LISTENER_PREFIX):
        reason = _ONLY_SECURITY_PER_LISTENER
    else:
        return None
    return Setting(name, Kind.PASSWORD, None, "", status=Status.REFUSED, reason=reason)
