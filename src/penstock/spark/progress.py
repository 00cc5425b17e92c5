"""A stream's lag behind its topics, from Spark's report of a micro-batch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.spark.ranges import from_json


def behind_latest(progress: Any) -> dict[str, float]:
    """See ``penstock.spark.offsets_behind_latest``."""
    report: Mapping[str, Any] = progress if isinstance(progress, Mapping) else json.loads(progress.json)
    behind: list[int] = []
    for source in report.get("sources", ()):
        reached, latest = _offsets(source.get("endOffset")), _offsets(source.get("latestOffset"))
        behind += [max(0, end - reached[at]) for at, end in latest.items() if at in reached]
    if not behind:
        return {}
    return {
        "maxOffsetsBehindLatest": float(max(behind)),
        "minOffsetsBehindLatest": float(min(behind)),
        "avgOffsetsBehindLatest": sum(behind) / len(behind),
    }


def _offsets(reported: Any) -> dict[Any, int]:
    """The offsets of a penstock source; none for another source, whose reports have another form."""
    try:
        return from_json(json.loads(reported) if isinstance(reported, str) else reported).offsets
    except (TypeError, ValueError, AttributeError):
        return {}
