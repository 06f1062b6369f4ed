"""Why a SuperNode ended is said in words, from what Flower 1.42 prints (methods/flower.md 2.2)."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeduet_client.device.exit_reasons import explain_exit
from edgeduet_client.device.supervisor import is_connected, since

# As printed by Flower 1.42 to a device that is not registered.
NOT_REGISTERED = (
    "2026-12-01 04:25:08,606 ERROR :     Exit Code: 305\n"
    "2026-12-01 04:25:08,401 Failed to initialize the connection to the SuperLink.\n"
    "2026-12-01 04:25:08,066 [code: 2004] Failed to activate SuperNode.\n"
    "2026-12-01 04:25:08,144 INFO:     Shutting down\n"
)


@pytest.mark.parametrize(
    ("text", "word", "remedy"),
    [
        (NOT_REGISTERED, "not-registered", "edgeduet-admin clients approve"),
        ("[code: 2001] SuperNode registration is disabled", "no-key", "enrol"),
        ("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed", "wrong-ca", "ca.crt"),
        ("certificate verify failed: certificate has expired (_ssl.c:1006)", "certificate-expired", "renew"),
        ("certificate verify failed: certificate is not yet valid", "clock", "NTP"),
        (
            "certificate verify failed: Hostname mismatch, certificate is not valid for 'a'",
            "certificate-name",
            "",
        ),
        ("Client error '401 Unauthorized' for url", "refused", "clock"),
        ("Exit Code: 606", "version", "same release"),
        ("Server disconnected without sending a response.", "no-tls", "TLS"),
        ("OSError: [Errno 28] No space left on device", "disk-full", "free some space"),
        ("[Errno 111] Connection refused", "unreachable", "network"),
    ],
)
def test_causes_are_told_apart(text: str, word: str, remedy: str) -> None:
    reason = explain_exit(text)
    assert reason is not None and reason.word == word
    assert remedy in reason.line and "\n" not in reason.line


def test_numbers_of_a_time_are_no_exit_code() -> None:
    assert explain_exit("2026-12-01 04:25:08,401 INFO fine\n2026-12-01 04:25:08,606 INFO fine\n") is None


def test_only_what_was_written_since_the_last_start_counts(tmp_path: Path) -> None:
    file = tmp_path / "supernode.log"
    assert since(file, 0) == ""
    file.write_text(NOT_REGISTERED)
    place = file.stat().st_size
    file.write_text(NOT_REGISTERED + "INFO : SuperNode ID: 7\n")
    assert explain_exit(since(file, place)) is None
    assert is_connected(since(file, place)) is True
    file.write_text("begun anew\n")
    assert since(file, place) == "begun anew\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("SuperNode ID: 7", True),
        ("SuperNode ID: 7\nConnection attempt failed, retrying in 3 seconds", False),
        ("Connection attempt failed, retrying\nConnection successful after 20 seconds and 4 tries.", True),
    ],
)
def test_the_last_word_on_the_connection_counts(text: str, expected: bool | None) -> None:
    assert is_connected(text) is expected
