"""``ssl.principal.mapping.rules``. What is expected here is what Kafka 4.4's own class answers."""

from __future__ import annotations

import time

import pytest

from penstock.tls.principals import (
    ATTRIBUTES_MAX,
    NAME_LENGTH_MAX,
    NoRuleMatches,
    PrincipalMapping,
    PrincipalRulesError,
)

# The example of Kafka's documentation, "Customizing SSL User Name".
DOCUMENTED = (
    "RULE:^CN=(.*?),OU=ServiceUsers.*$/$1/,"
    "RULE:^CN=(.*?),OU=(.*?),O=(.*?),L=(.*?),ST=(.*?),C=(.*?)$/$1@$2/L,"
    "RULE:^.*[Cc][Nn]=([a-zA-Z0-9.]*).*$/$1/L,"
    "DEFAULT"
)
UNKNOWN = "O=Unknown,L=Unknown,ST=Unknown,C=Unknown"


@pytest.mark.parametrize(
    ("name", "user"),
    [
        (f"CN=serviceuser,OU=ServiceUsers,{UNKNOWN}", "serviceuser"),
        (f"CN=adminUser,OU=Admin,{UNKNOWN}", "adminuser@admin"),
        ("cn=Bob.Smith,dc=x", "bob.smith"),
        ("O=nobody", "O=nobody"),
    ],
)
def test_documented_example_maps_names_as_documented(name: str, user: str) -> None:
    assert PrincipalMapping(DOCUMENTED).user(name) == user


def test_name_is_the_user_by_default() -> None:
    assert PrincipalMapping().user("CN=alice,OU=x,O=y") == "CN=alice,OU=x,O=y"


@pytest.mark.parametrize(
    ("rules", "name", "user"),
    [
        # Case.
        ("RULE:^CN=(.*?),.*$/$1/U", "CN=alice,O=x", "ALICE"),
        ("RULE:^CN=(.*?),.*$/$1/L,", "CN=Alice,O=x", "alice"),
        # White space around rules, and after a comma.
        ("RULE:^CN=(.*),OU=[^,]*$/$1/L , RULE:^(.*)$/u-$1/U", "CN=A,OU=B", "a"),
        ("RULE:^CN=(.*),OU=[^,]*$/$1/L , RULE:^(.*)$/u-$1/U", "O=b", "U-O=B"),
        ("DEFAULT , DEFAULT", "CN=a", "CN=a"),
        # The pattern matches the whole name, and then every match is replaced.
        ("RULE:^CN=(.*?)/$1/", "CN=a,O=b", "a,O=b"),
        ("RULE:.*/x/", "CN=a", "xx"),
        ("RULE:^CN=(.*)$//", "CN=a", ""),
        ("RULE:/x/", "", "x"),
        # Groups.
        ("RULE:^CN=(.*)$/$0/", "CN=a", "CN=a"),
        ("RULE:^CN=(.*)$/$12/", "CN=a", "a2"),
        ("RULE:^CN=(.*)$/$01/", "CN=a", "a"),
        ("RULE:^(C)(N)(=)(.)(.)(.)(.)(.)(.)(.)(.*)$/$11-$10-$111/", "CN=abcdefghij", "hij-g-hij1"),
        ("RULE:^CN=(a)?(.*)$/[$1]$2/", "CN=b", "[]b"),
        ("RULE:^CN=(?<n>.*)$/${n}-/", "CN=a", "a-"),
        # A group that does not exist is text.
        ("RULE:^CN=(.*)$/$2/", "CN=a", "$2"),
        ("RULE:^CN=(.*)$/$1$3/", "CN=a", "a$3"),
        ("RULE:^CN=(.*)$/$22/", "CN=a", "$22"),
        # Backslashes.
        (r"RULE:^CN=(.*)$/\$1/", "CN=a", "$1"),
        (r"RULE:^CN=(.*)\/(.*)$/$1-$2/", "CN=a/b", "a-b"),
        (r"RULE:^CN=(.*)$/$1\/x/", "CN=a", "a/x"),
        (r"RULE:^CN=(.*)$/$1\\x/", "CN=a", "a\\x"),
        (r"RULE:^CN=(.*)\\/$1/", "CN=a\\", "a"),
        (r"RULE:^CN=(.*)$/a\\\$1/", "CN=a", "a\\$1"),
    ],
)
def test_rules_mean_what_they_mean_in_kafka(rules: str, name: str, user: str) -> None:
    assert PrincipalMapping(rules).user(name) == user


@pytest.mark.parametrize(
    "rules",
    [
        "RULE:^CN=(.*?),.*$/$1/X",
        "RULE:^CN=(.*)$/$1",
        "RULE:^CN=(.*)",
        "DEFAULTX",
        "default",
        "RULE:^CN=((.*)$/$1/",
        "RULE:^CN=(.*)$/$1/LU",
        "RULE:^CN=(.*)$/$1/L/",
        "RULE:^CN=(.*)$/$1/l",
        "RULE:^CN=(.*)$/$1/,DEFAULT junk",
        "RULE:^CN=(.*)$/$1/ DEFAULT",
        "RULE:^CN=(.*)$/$1/,RULE:^(.*$/$1/",
        # Kafka finds these only when a client comes.
        "",
        " ",
        "RULE:^CN=(.*)$/a$/",
        "RULE:^CN=(.*)$/a$b/",
        "RULE:^CN=(.*)$/${x}/",
        "RULE:^CN=(.*)$/a\\/",
        # These are right in Java. Python has no such patterns, or they mean something else.
        r"RULE:^CN=(\p{Alpha}*)$/$1/",
        "RULE:^CN=([a-z&&[^b]]*)$/$1/",
    ],
)
def test_rules_that_cannot_be_used_are_refused_in_one_line(rules: str) -> None:
    with pytest.raises(PrincipalRulesError) as raised:
        PrincipalMapping(rules)
    assert str(raised.value).startswith("ssl.principal.mapping.rules")
    assert "\n" not in str(raised.value)


def test_name_without_matching_rule_has_no_user() -> None:
    with pytest.raises(NoRuleMatches, match=r"no rule .* matches O=x"):
        PrincipalMapping("RULE:^CN=(.*)$/$1/").user("O=x")


def test_letters_of_a_pattern_are_ascii_as_in_java() -> None:
    with pytest.raises(NoRuleMatches):
        PrincipalMapping(r"RULE:(\w+)=(.*)/$2/").user("ÄN=a")


def test_name_that_is_too_long_is_not_given_to_a_pattern() -> None:
    mapping = PrincipalMapping("RULE:^.*$/x/")
    assert mapping.user("a" * NAME_LENGTH_MAX) in ("x", "xx")
    with pytest.raises(NoRuleMatches, match="more than 512 characters"):
        mapping.user("a" * (NAME_LENGTH_MAX + 1))


@pytest.mark.parametrize("separator", [",", "+"])
def test_name_of_too_many_attributes_is_not_given_to_a_pattern(separator: str) -> None:
    mapping = PrincipalMapping("RULE:^.*$/x/")
    # Signs within a value are escaped and do not count.
    name = separator.join([r"CN=a\=b\\\=c\,\+"] + ["OU=x"] * (ATTRIBUTES_MAX - 1))
    assert mapping.user(name) in ("x", "xx")
    with pytest.raises(NoRuleMatches, match="more than 32 attributes"):
        mapping.user(f"{name}{separator}O=y")


def test_documented_rule_takes_no_noticeable_time_for_any_name() -> None:
    """They almost match: one has as many attributes and characters as are allowed, the other more."""
    mapping = PrincipalMapping("RULE:^CN=(.*?),OU=(.*?),O=(.*?),L=(.*?),ST=(.*?),C=(.*?)$/$1@$2/L")
    each = (ATTRIBUTES_MAX - 1) // 4
    allowed = (
        "CN=a" + ",OU=x" * each + ",O=x" * each + ",L=x" * each + ",ST=x" * (ATTRIBUTES_MAX - 1 - 3 * each)
    )
    allowed += "x" * (NAME_LENGTH_MAX - len(allowed))
    longer = "CN=a" + ",OU=x" * 40 + ",O=x" * 40 + ",L=x" * 40 + ",ST=x" * 40
    for name, error in [(allowed, "no rule"), (longer, "more than 512 characters")]:
        began_s = time.process_time()
        with pytest.raises(NoRuleMatches, match=error):
            mapping.user(name)
        assert time.process_time() - began_s < 1.0
