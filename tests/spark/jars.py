"""The jars of Spark's own Kafka connector, from Maven Central.

Spark reads its class path when the JVM starts, so the shared session of ``conftest`` is given them at once,
where they can be had. Only what pyspark does not bring: named one by one, because the connector's own list
of dependencies is all of Spark and Hadoop.
"""

from __future__ import annotations

from tests.java import jars

# Connectors appear some weeks after pyspark, and the token provider more rarely than they; what they use of
# Spark has not changed in between. kafka-clients and commons-pool2 as the connector's pom names them.
CONNECTOR = (
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    "org.apache.kafka:kafka-clients:3.9.2",
    "org.apache.commons:commons-pool2:2.13.1",
)


def connector_jars() -> list[str]:
    """Paths for ``spark.jars``. Raises ``tests.tools.Missing`` where they cannot be had."""
    return [str(path) for path in jars(*CONNECTOR, alone=True)]
