"""Topics by their names, asked of a cluster in which not every broker knows everything at once."""

from __future__ import annotations

import time
from collections.abc import Sequence

from penstock.spark.planning import GONE_PAUSE_S, UNHEARD_OF_S
from penstock.wire import Client, TopicInfo


def find_topics(client: Client, names: Sequence[str]) -> dict[str, TopicInfo]:
    """What the cluster says of these topics, without those that do not exist.

    One that has just been made may not be known to the broker that is asked, so that is asked for a while.
    """
    deadline = time.monotonic() + UNHEARD_OF_S
    while True:
        found = client.topics(names)
        if len(found) == len(set(names)) or time.monotonic() > deadline:
            return found
        time.sleep(GONE_PAUSE_S)
