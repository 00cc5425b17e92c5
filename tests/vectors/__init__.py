"""Golden bytes: frames that real clients sent to Apache Kafka, and what it answered.

``record`` makes them, ``load`` reads them. They come from other people's encoders, never from ours.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent


class Vector(NamedTuple):
    api_key: int
    name: str  # of the API, such as "Produce"
    version: int
    direction: str  # "request" or "response"
    client: str  # who sent it, or who was answered, with its version
    frame: bytes  # header and body, without the length in front

    def __str__(self) -> str:
        return f"{self.name}-{self.version}-{self.direction}"


def load() -> list[Vector]:
    """All vectors, in the order of their keys and versions."""
    vectors = []
    for path in HERE.glob("*.json"):
        stored = json.loads(path.read_text())
        for each in stored["frames"]:
            frame = bytes.fromhex(each["bytes"])
            key, name = stored["api_key"], stored["name"]
            vectors.append(Vector(key, name, each["version"], each["direction"], each["client"], frame))
    return sorted(vectors)
