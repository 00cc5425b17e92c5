"""Look up topics by name in a cluster where a broker may be behind."""

from __future__ import annotations

import time
from collections.abc import Sequence

from penstock.spark.planning import GONE_PAUSE_S, UNHEARD_OF_S
from penstock.wire import Client, TopicInfo


def find_topics(client: Client, names: Sequence[str]) -> dict[str, TopicInfo]:
    """Metadata of these topics, without those that do not exist.

    A broker may not know a new topic yet, so a missing one is looked up again for a while.
    """
    deadline = time.monotonic() + UNHEARD_OF_S
    while True:
        found = client.topics(names)
        if len(found) == len(set(names)) or time.monotonic() > deadline:
            return found
        time.sleep(GONE_PAUSE_S)
