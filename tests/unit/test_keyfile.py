"""The file of API keys: what it may hold, and what is said of one that holds something else."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.server.keyfile import Rules, digest, hashed, lines_for, new_key, parsed, read_key_file
from headrace.server.keyring import changes
from headrace.server.rates import Bucket
from headrace.server.tenants import Tenant, salt_of
from tests.support.tenant_keys import Write, key_file

pytestmark = pytest.mark.unit

KEY = "sha256:" + "ab" * 32


@pytest.fixture
def write(tmp_path: Path) -> Write:
    return key_file(tmp_path)


def test_tenants_with_their_keys_and_rules(write: Write) -> None:
    file = read_key_file(
        write(f"""
        [tenants.acme]
        keys = ["{KEY}", "plain-key-of-acme"]
        weight = 2
        tokens_per_minute = 1_000
        [tenants."b.c"]
    """)
    )
    assert file.owners == {bytes.fromhex("ab" * 32): "acme", digest(b"plain-key-of-acme"): "acme"}
    assert file.rules == {"acme": Rules(weight=2.0, tokens_per_minute=1000), "b.c": Rules()}
    assert "plain-key" not in repr(file) and not file.readable


def test_the_mark_of_an_editor_does_not_matter(write: Write) -> None:
    assert read_key_file(write(f'\ufeff[tenants.acme]\nkeys = ["{KEY}"]')).rules == {"acme": Rules()}


def test_the_page_on_keys_shows_a_file_and_names_every_rule(write: Write) -> None:
    page = (Path(__file__).parents[2] / "docs/keys.md").read_text()
    (shown,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    file = read_key_file(write(shown))
    assert set(file.rules) == {"acme", "guests"} and len(file.owners) == 3
    table = page.partition("## The file")[2].partition("\n\nA file")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == {"keys", *Rules.__struct_fields__}


@pytest.mark.parametrize("name", ["acme", "a.b"])
def test_what_the_command_prints_is_a_file(write: Write, name: str) -> None:
    key = new_key()
    file = read_key_file(write(lines_for(name, key)))
    assert file.owners == {digest(key.encode()): name} and key not in lines_for(name, key)
    assert len(key) > 40 and new_key() != key


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[tenants.a]\nkeys = ]\n", "line 2"),
        ("", "there are no tenants"),
        ("tenants = 3", "there are no tenants"),
        ("x = 1\n[tenants.a]", "'x' is not expected"),
        ("[tenants]\na = 1", "tenants.a must be a table"),
        ('[tenants."a b"]', "a tenant's name has"),
        ("[tenants.a]\nkeys = 'k'", "tenants.a.keys must be a list"),
        ("[tenants.a]\nkeys = ['sha256:12']", "tenants.a.keys[0] must be sha256:"),
        (f"[tenants.a]\nkeys = ['{KEY}', 'a key']", "tenants.a.keys[1] must be sha256:"),
        ("[tenants.a]\nkeys = ['short']", "tenants.a.keys[0] must be sha256:"),
        ("[tenants.a]\nkeys = [1]", "tenants.a.keys[0] must be sha256:"),
        (f"[tenants.a]\nkeys = ['{KEY}']\n[tenants.b]\nkeys = ['{KEY}']", "tenants.b.keys[0] is a key of tenant a"),
        ("[tenants.a]\nweight = 0", "tenants.a.weight: expected float >= 0.001"),
        ("[tenants.a]\nweight = nan", "tenants.a.weight: expected"),
        ("[tenants.a]\nweight = inf", "tenants.a.weight: expected"),
        ("[tenants.a]\nrequests_per_minute = 0", "tenants.a.requests_per_minute: expected int >= 1"),
        ("[tenants.a]\nkv_share = 1.5", "tenants.a.kv_share: expected float <= 1"),
        ("[tenants.a]\nkv_share = 0.5\n[tenants.b]\nkv_share = 0.5", "kv_share of all tenants is 1 together"),
        ("[tenants.a]\nkv_share = 0.5\nkv_limit = 0.4", "tenants.a: kv_share 0.5 is above its kv_limit 0.4"),
        ("[tenants.a]\ntier_quota = -0.1", "tenants.a.tier_quota: expected float >= 0"),
        ("[tenants.a]\ntier_quota = 0.6\n[tenants.b]\ntier_quota = 0.5", "tier_quota of all tenants is 1.1 together"),
        ("[tenants.a]\nmax_output_tokens = true", "tenants.a.max_output_tokens: expected int, got bool"),
        ("[tenants.a]\nmax_output_tokens = 99999999999999999999", "tenants.a.max_output_tokens: "),
        ("[tenants.a]\nrequest_per_minute = 1", "tenants.a: object contains unknown field request_per_minute"),
        ("[tenants.a]\nsalt = ''", "tenants.a.salt: expected str of length >= 1"),
        ("[tenants.a]\nsalt = 'b'\n[tenants.b]", "tenants.b has the salt of tenant a"),
        ("\n".join(f"[tenants.a{i}]" for i in range(1001)), "at most 1,000 tenants"),
        ("[tenants.a]\nx = " + "[" * 5000, "api_keys_file"),
    ],
)
def test_a_bad_file_is_told_by_its_place(write: Write, text: str, told: str) -> None:
    with pytest.raises(ValueError) as error:
        read_key_file(write(text))
    assert told in str(error.value) and "keys.toml" in str(error.value)
    assert KEY not in str(error.value) and "a key'" not in str(error.value)


values = st.recursive(
    st.one_of(st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.sampled_from([KEY, "a-plain-key"])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=5,
)
names = st.one_of(st.sampled_from([*Rules.__struct_fields__, "keys", "tenants", "a"]), st.text(max_size=4))
tables = st.dictionaries(names, values, max_size=4)


files = st.dictionaries(names, st.one_of(values, st.dictionaries(names, st.one_of(tables, values))), max_size=2)


@given(files)
def test_whatever_it_holds_it_is_taken_or_refused(told: dict[str, Any]) -> None:
    try:
        rules, owners = parsed(told)
    except ValueError as error:
        assert str(error) and KEY not in str(error)
    else:
        assert rules and set(owners.values()) <= set(rules)


def test_the_command_makes_a_key_and_its_line() -> None:
    runner = CliRunner()
    _, key, _, line = runner.invoke(app, ["keys", "new"]).stdout.splitlines()
    assert line == f'"{hashed(key)}",'
    told = runner.invoke(app, ["keys", "new", "--tenant", "acme"]).stdout.splitlines()
    assert told[3:] == lines_for("acme", told[1]).splitlines()
    bad = runner.invoke(app, ["keys", "new", "--tenant", "a b"])
    assert bad.exit_code == 2 and "a tenant's name has" in bad.stderr


def test_files_that_cannot_be_read(tmp_path: Path, write: Write) -> None:
    with pytest.raises(ValueError, match="No such file"):
        read_key_file(str(tmp_path / "none"))
    (tmp_path / "binary").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="byte 0 is not UTF-8"):
        read_key_file(str(tmp_path / "binary"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a regular file"):
        read_key_file(str(tmp_path / "pipe"))


def test_a_file_that_all_can_read(write: Write) -> None:
    path = write("[tenants.a]")
    os.chmod(path, 0o604)
    assert read_key_file(path).readable


def test_changes_are_told_without_keys(write: Write) -> None:
    before = read_key_file(write(f"[tenants.a]\nkeys = ['{KEY}', 'eight-characters']\n[tenants.b]"))
    after = read_key_file(write(f"[tenants.a]\nkeys = ['{KEY}', 'another-key']\nweight = 2\n[tenants.c]"))
    told = "1 key added (a); 1 key removed (a); rules changed (a); tenants removed (b)"
    assert changes(before, after) == told
    assert changes(before, before) == "no change"


salts = st.one_of(st.none(), st.text(max_size=8), st.sampled_from(["a", "b", "ab", "", "tenant:a"]))


@given(st.lists(st.tuples(st.text(min_size=1, max_size=4), salts), min_size=2, max_size=8, unique=True))
def test_no_two_tenants_and_client_salts_meet(pairs: list[tuple[str, str | None]]) -> None:
    assert len({salt_of(tenant, client) for tenant, client in pairs}) == len(pairs)


@given(st.text(min_size=1, max_size=4))
def test_a_client_cannot_choose_a_tenants_salt(client: str) -> None:
    """Neither within its own, nor with the one key beside the file; not even if it knows what the engine is given."""
    acme, other, one_key = (Tenant(name, Rules()) for name in ("acme", "other", ""))
    reached = {acme.salt(None), acme.salt("x")}
    for salt in (client, "acme", *reached):
        assert other.salt(salt) not in reached and one_key.salt(salt) not in reached
    assert one_key.salt(None) is None and Tenant("", Rules(), salted=False).salt(client) == client


def test_hashed_keys_are_digests() -> None:
    assert hashed("k") == "sha256:" + digest(b"k").hex()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@given(st.integers(1, 1000), st.lists(st.tuples(st.floats(0, 100), st.integers(1, 2000)), max_size=30))
def test_never_more_than_the_rate_and_one_burst(rate: int, asked: list[tuple[float, int]]) -> None:
    clock = Clock()
    bucket, had = Bucket(rate, clock), 0
    for wait_s, amount in asked:
        clock.now += wait_s
        if not bucket.wait_s(amount):
            bucket.spend(amount)
            had += amount
    largest = max((amount for _, amount in asked), default=0)
    assert had <= rate + clock.now * rate / 60 + max(0, largest - rate) + 1e-6


def test_a_bucket_tells_when() -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    bucket.spend(60)
    assert bucket.wait_s(6) == pytest.approx(6)
    clock.now = 6
    assert bucket.wait_s(6) == 0
    bucket.spend(66)  # a debt
    assert bucket.level == -60 and bucket.wait_s(1) == pytest.approx(61)
    bucket.spend(-200)
    assert bucket.level == 60, "what is given back fills it, no more"
    assert bucket.wait_s(1000) == 0, "more than a minute brings goes once it is full"
    bucket.change(10)
    assert bucket.level == 10
