"""Java's line with a login module: two modules, a name and a password, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.sasl import jaas
from penstock.sasl.jaas import JaasError
from penstock.sasl.settings import SaslSettings, SaslSettingsError

SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"
PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"


@pytest.mark.parametrize(
    ("text", "login"),
    [
        (f'{SCRAM} required username="alice" password="a b";', ("SCRAM", "alice", "a b")),
        (f'  {PLAIN}  required\n password="x"\n username="alice" ; ', ("PLAIN", "alice", "x")),
        (f"{PLAIN} required username='alice' password=hunter-2.x;", ("PLAIN", "alice", "hunter-2.x")),
        (rf'{SCRAM} required username="a\"b" password="c\\d\te;=";', ("SCRAM", 'a"b', "c\\d\te;=")),
        (rf'{SCRAM} required username="a" password="\\1";', ("SCRAM", "a", "\\1")),
    ],
)
def test_name_and_password_are_read(text: str, login: tuple[str, str, str]) -> None:
    assert jaas.parse(text) == login
    assert "alice" not in repr(jaas.parse(text))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not a line such as"),
        (";", "not a line such as"),
        (f'{SCRAM} required username="a" password="hunter2"', "not a line such as"),
        (f'{SCRAM} username="a" password="hunter2";', "followed by: required"),
        (f'{SCRAM} optional username="a" password="hunter2";', "followed by: required"),
        ('com.sun.security.auth.module.JndiLoginModule required user.provider.url="ldap://x";', "only Scram"),
        ("org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required;", "only ScramLogin"),
        ('ScramLoginModule required username="a" password="hunter2";', "only ScramLoginModule"),
        (f'{SCRAM} required username="a" password="hunter2" tokenauth="true";', "other than username"),
        (f'{SCRAM} required username="a" password="hunter2" password="b";', "password is there twice"),
        (f'{SCRAM} required username="a";', "password is missing"),
        (f'{SCRAM} required username="" password="hunter2";', "username is missing"),
        (f'{SCRAM} required username="a" password="hunter2;', "double quotes"),
        (f'{SCRAM} required username="a" password=hunter2!;', "double quotes"),
        (f'{SCRAM} required username="a", password="hunter2";', "double quotes"),
        (f'{SCRAM} required "username"="a" password="hunter2";', "not a line such as"),
        (f'{SCRAM} required username="a" password="hunter2"; {SCRAM} required username="a";', "not a line"),
        (rf'{SCRAM} required username="a" password="hunter2\101";', "backslash with a number"),
        (f'{SCRAM} required username="a" password="hunter2" // comment\n;', "double quotes"),
    ],
)
def test_everything_else_is_refused_without_showing_it(text: str, why: str) -> None:
    with pytest.raises(JaasError, match=why) as refused:
        jaas.parse(text)
    assert "hunter2" not in str(refused.value) and "ldap" not in str(refused.value)
    assert str(refused.value).isprintable()


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1))
def test_any_password_can_be_quoted(password: str) -> None:
    quoted = password.replace("\\", "\\\\").replace('"', '\\"')
    assert jaas.parse(f'{SCRAM} required username="a" password="{quoted}";').password == password


def test_module_and_mechanism_must_fit() -> None:
    line = f'{SCRAM} required username="alice" password="hunter2";'
    assert SaslSettings.from_kafka(
        {"sasl.mechanism": "SCRAM-SHA-512", "sasl.jaas.config": line}
    ) == SaslSettings("SCRAM-SHA-512", "alice", "hunter2")
    for mechanism, why in (
        ("PLAIN", "this login module is not for PLAIN"),
        ("GSSAPI", "GSSAPI is not supported"),
        ("OAUTHBEARER", "OAUTHBEARER is not supported here"),
        ("", "sasl.mechanism is missing"),
    ):
        with pytest.raises(SaslSettingsError, match=why):
            SaslSettings.from_kafka({"sasl.mechanism": mechanism, "sasl.jaas.config": line})
    with pytest.raises(SaslSettingsError, match=r"sasl.jaas.config is missing"):
        SaslSettings.from_kafka({"sasl.mechanism": "PLAIN"})
