"""Requests for enrolment: accepted as they were made, refused in every other form."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from edgeduet_shared.enrolment import (
    CLOCK_AHEAD,
    PREFIX,
    VALID_FOR,
    EnrolmentError,
    fingerprint,
    make_request,
    public_key_text,
    read_request,
    request_code,
    same_code,
)
from edgeduet_shared.errors import ConfigError, EdgeDuetError

NOW = datetime(2026, 12, 1, 4, 0, tzinfo=UTC)
KEY = ec.generate_private_key(ec.SECP384R1())
OTHER = ec.generate_private_key(ec.SECP384R1())
LINE = make_request(KEY, name="edge-1", server="fl.example.org:9443", now=NOW)


def signed(body: Any, key: ec.EllipticCurvePrivateKey = KEY) -> str:
    """A request with any body and a right signature."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    text = f"{PREFIX}.{base64.urlsafe_b64encode(content).rstrip(b'=').decode()}"
    signature = key.sign(text.encode(), ec.ECDSA(hashes.SHA384()))
    return f"{text}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


def body(**changes: Any) -> dict[str, Any]:
    return {
        "name": "edge-1",
        "public_key": public_key_text(KEY.public_key()),
        "server": "fl.example.org:9443",
        "nonce": "0" * 32,
        "created": NOW.isoformat(),
        **changes,
    }


def test_a_request_says_what_was_put_into_it() -> None:
    request = read_request(LINE, now=NOW + timedelta(hours=23))
    assert (request.name, request.server, request.created) == ("edge-1", "fl.example.org:9443", NOW)
    assert request.public_key == public_key_text(KEY.public_key())
    assert request.code == request_code(LINE)
    assert len(request.fingerprint) == 64


def test_a_request_survives_being_wrapped_by_a_mail_program() -> None:
    wrapped = "  " + "\r\n ".join(LINE[i : i + 60] for i in range(0, len(LINE), 60)) + "\n"
    assert read_request(wrapped, now=NOW) == read_request(LINE, now=NOW)


def test_every_request_is_another_one() -> None:
    again = make_request(KEY, name="edge-1", server="fl.example.org:9443", now=NOW)
    assert read_request(again, now=NOW).nonce != read_request(LINE, now=NOW).nonce
    assert request_code(again) != request_code(LINE)


@given(st.integers(0, len(LINE) - 1), st.characters(codec="ascii"))
def test_no_character_can_be_changed(position: int, character: str) -> None:
    altered = LINE[:position] + character + LINE[position + 1 :]
    if "".join(altered.split()) == LINE:
        return
    with pytest.raises(EdgeDuetError) as caught:
        read_request(altered, now=NOW)
    assert "\n" not in str(caught.value)


@given(st.text() | st.binary().map(lambda b: f"{PREFIX}.{base64.urlsafe_b64encode(b).decode()}.AAAA"))
def test_anything_else_is_one_clear_line(text: str) -> None:
    with pytest.raises(EnrolmentError) as caught:
        read_request(text, now=NOW)
    assert str(caught.value).isprintable()


def test_the_key_of_another_cannot_be_enrolled() -> None:
    with pytest.raises(EnrolmentError, match="not signed with the key it holds"):
        read_request(signed(body(), key=OTHER), now=NOW)


@pytest.mark.parametrize(
    ("age", "words"),
    [(VALID_FOR + timedelta(seconds=1), "good for 24 hours"), (-CLOCK_AHEAD - timedelta(seconds=1), "from the future")],
)
def test_old_requests_and_those_of_tomorrow_are_refused(age: timedelta, words: str) -> None:
    with pytest.raises(EnrolmentError, match=words):
        read_request(LINE, now=NOW + age)


@pytest.mark.parametrize("age", [VALID_FOR, -CLOCK_AHEAD])
def test_at_the_edge_of_its_time_a_request_is_good(age: timedelta) -> None:
    assert read_request(LINE, now=NOW + age).name == "edge-1"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "../../etc/passwd"}, "is no name"),
        ({"name": "edge\n2026 INFO all is well"}, "is no name"),
        ({"name": "\x1b[2Jedge"}, "is no name"),
        ({"nonce": "short"}, "nonce"),
        ({"created": "2026-12-01T04:00:00"}, "no time"),
        ({"created": "yesterday"}, "no time"),
        ({"server": "x\ny"}, "no proper server"),
        ({"public_key": "ssh-rsa AAAA"}, "no public key|not NIST"),
        ({"extra": "1"}, "other fields"),
        ({"name": 7}, "other fields"),
        ({"public_key": public_key_text(ec.generate_private_key(ec.SECP256R1()).public_key())}, "not NIST P-384"),
        (
            {
                "public_key": ed25519.Ed25519PrivateKey.generate()
                .public_key()
                .public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
                .decode()
            },
            "not NIST P-384",
        ),
    ],
)
def test_a_signed_request_with_bad_content_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(EdgeDuetError, match=words) as caught:
        read_request(signed(body(**changes)), now=NOW)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("content", [b"[]", b"null", b"{", b"[" * 2000, "\ud800".encode("utf-8", "surrogatepass")])
def test_a_body_that_is_no_object_is_refused(content: bytes) -> None:
    with pytest.raises(EnrolmentError):
        read_request(signed(content), now=NOW)


def test_a_huge_request_is_refused_before_it_is_read() -> None:
    with pytest.raises(EnrolmentError, match="more than any real one"):
        read_request(f"{PREFIX}." + "A" * 100_000 + ".A", now=NOW)


def test_a_key_on_another_curve_makes_no_request() -> None:
    with pytest.raises(EnrolmentError, match="P-384"):
        make_request(ec.generate_private_key(ec.SECP256R1()), name="edge", server="x:1", now=NOW)
    with pytest.raises(ConfigError):
        make_request(KEY, name="../edge", server="x:1", now=NOW)


def test_a_code_may_be_typed_in_any_way_but_must_be_right() -> None:
    code = request_code(LINE)
    assert len(code) == 14
    assert same_code(code.lower().replace("-", " "), code)
    assert not same_code("", code)
    assert not same_code(code[:-1] + ("A" if code[-1] != "A" else "B"), code)
    assert not same_code("é" * 12, code)


def test_the_comment_of_a_key_does_not_change_its_fingerprint() -> None:
    key = public_key_text(KEY.public_key())
    assert fingerprint(f"{key} me@home") == fingerprint(key)
