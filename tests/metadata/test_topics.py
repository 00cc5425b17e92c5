"""Names of topics."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.metadata.topics import NAME_MAX, collision_key, is_internal, name_error


@pytest.mark.parametrize("name", ["a", "A-1_b.c", "...", "-", "_", "x" * NAME_MAX, "__consumer_offsets"])
def test_legal_names_have_no_error(name: str) -> None:
    assert name_error(name) is None


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "x" * (NAME_MAX + 1), "a/b", "../a", "a b", "a\n", "a\0", "ä", "a:b", "a\\b", "\u0663"],
)
def test_other_names_are_refused_with_a_reason(name: str) -> None:
    assert name_error(name)


@given(st.text(st.sampled_from("aZ9._-/ é\n"), max_size=8))
@settings(deadline=None)
def test_the_rule_is_kafkas(name: str) -> None:
    legal = re.fullmatch(r"[a-zA-Z0-9._-]{1,249}", name) is not None and name not in (".", "..")
    assert (name_error(name) is None) == legal


def test_dots_and_underscores_are_the_same_to_a_collision() -> None:
    assert collision_key("a.b_c") == collision_key("a_b.c") != collision_key("a-b-c")


def test_internal_topics_are_the_brokers_own() -> None:
    assert is_internal("__consumer_offsets") and is_internal("__cluster_metadata")
    assert not is_internal("__mine")
