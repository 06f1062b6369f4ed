"""Who may ask a server."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeduet_client.llm.serving.access import (
    TOKEN_VARIABLE,
    Access,
    AccessError,
    access_for,
    is_loopback,
    open_to_all,
    read_token,
)
from edgeduet_client.llm.serving.refusals import NotAllowed

TOKEN = "correct-horse-battery-staple"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost", "LOCALHOST", "localhost."])
def test_addresses_of_this_machine_alone_need_no_token(host: str) -> None:
    assert is_loopback(host)
    assert not access_for(host, None).needs_token


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "10.0.0.1", "example.org", "localhost.evil.org", ""])
def test_any_other_address_is_refused_without_a_token(host: str) -> None:
    with pytest.raises(AccessError, match="needs a token"):
        access_for(host, None)
    assert access_for(host, TOKEN).needs_token


def test_the_right_token_opens() -> None:
    Access(TOKEN).check_token(f"Bearer {TOKEN}")
    Access(TOKEN).check_token(f"bearer {TOKEN} ")


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}"]
)
def test_anything_else_does_not(header: str | None) -> None:
    with pytest.raises(NotAllowed):
        Access(TOKEN).check_token(header)


@given(st.text())
def test_no_other_text_opens_and_none_breaks_the_check(text: str) -> None:
    if text.strip() != TOKEN:
        with pytest.raises(NotAllowed):
            Access(TOKEN).check_token(f"Bearer {text}")


def test_without_a_token_only_names_of_this_machine_are_answered() -> None:
    access = Access(None)
    for host in ("localhost", "localhost:8217", "127.0.0.1:80", "[::1]:8217", "[::1]", "::1"):
        access.check_host(host)
    # A page at rebound.example may point that name at 127.0.0.1; its requests still carry the name.
    for host in ("rebound.example", "rebound.example:8217", "192.168.0.7:8217", "", None):
        with pytest.raises(NotAllowed):
            access.check_host(host)
    Access(TOKEN).check_host("device.example")


def test_a_token_comes_from_a_file_or_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert read_token(file, {TOKEN_VARIABLE: "something-else-entirely"}) == TOKEN
    assert read_token(None, {TOKEN_VARIABLE: TOKEN}) == TOKEN
    assert read_token(None, {}) is None


@pytest.mark.parametrize("bad", ["", "short", "two words that are long enough", "ünïcödé-ünïcödé-ünïcödé", "a\nb" * 10])
def test_tokens_that_are_weak_or_cannot_be_sent_are_refused(tmp_path: Path, bad: str) -> None:
    file = tmp_path / "token"
    file.write_text(bad)
    with pytest.raises(AccessError) as refused:
        read_token(file, {})
    assert str(file) in str(refused.value) and (not bad.strip() or bad.strip() not in str(refused.value))
    with pytest.raises(AccessError, match=TOKEN_VARIABLE):
        read_token(None, {TOKEN_VARIABLE: bad})


def test_a_token_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(AccessError, match="No such file"):
        read_token(tmp_path / "missing", {})
    (tmp_path / "binary").write_bytes(b"\xff" * 32)
    with pytest.raises(AccessError, match="not UTF-8"):
        read_token(tmp_path / "binary", {})


def test_a_token_file_that_everybody_can_read_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    assert not open_to_all(file)
    file.chmod(0o644)
    assert open_to_all(file)
