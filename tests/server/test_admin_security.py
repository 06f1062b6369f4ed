"""Who gets past the admin service's door: tokens, roles, attempts, strange messages, names, logs."""

from __future__ import annotations

import json
import logging
import socket
import ssl
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select, text

from admin_home import AdminHome, admin_home
from edgeduet_server.admin.attempts import Attempts
from edgeduet_server.admin.dispatch import SERVICE, address_of
from edgeduet_server.admin.roles import RULES, Role
from edgeduet_server.admin.server import LARGEST_MESSAGE
from edgeduet_server.registry.models import AuditEntry, Token
from edgeduet_shared.admin_api import admin_pb2 as pb

METHODS = [method.name for method in SERVICE.methods]
CHANGING = sorted(name for name, rule in RULES.items() if rule.audited)


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminHome]:
    with admin_home(tmp_path_factory.mktemp("server") / "home") as made:
        yield made


@pytest.fixture
def home(shared_home: AdminHome) -> AdminHome:
    """The same service for all tests; old wrong attempts are long ago."""
    shared_home.clock.pass_(minutes=5)
    return shared_home


def secret_of(token: str) -> str:
    """The part of ``edt_<id>_<secret>`` nobody may see; a secret may hold underscores itself."""
    return token.split("_", 2)[2]


def empty(method: str) -> Any:
    return GetMessageClass(SERVICE.methods_by_name[method].input_type)()


def refused(home: AdminHome, method: str, request: Any, authorization: str | None) -> grpc.Call:
    with pytest.raises(grpc.RpcError) as caught:
        home.raw(method, request, authorization)
    return caught.value  # type: ignore[return-value]


def audit_log(home: AdminHome) -> list[AuditEntry]:
    with home.registry.reading() as session:
        return list(session.scalars(select(AuditEntry).order_by(AuditEntry.id)))


# -- tokens ---------------------------------------------------------------------------------------------


def test_every_method_has_a_rule_and_every_rule_a_method() -> None:
    assert set(METHODS) == set(RULES)


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_answered_without_a_token(home: AdminHome, method: str) -> None:
    error = refused(home, method, empty(method), None)
    assert error.code() == grpc.StatusCode.UNAUTHENTICATED
    assert "edgeduet-admin login" in error.details()


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer edt_",
        "Bearer edt_000000000000_" + "A" * 43,
        "Basic YWRtaW46YWRtaW4=",
        "Bearer ' OR 1=1 --",
        "Bearer " + "A" * 5000,
    ],
)
def test_what_is_no_token_of_this_server_opens_nothing(home: AdminHome, authorization: str) -> None:
    assert refused(home, "Status", pb.StatusRequest(), authorization).code() == grpc.StatusCode.UNAUTHENTICATED


def test_a_token_with_one_letter_changed_opens_nothing(home: AdminHome) -> None:
    token = home.token("viewer")
    changed = token[:-1] + ("A" if token[-1] != "A" else "B")
    assert home.call("Status", pb.StatusRequest(), token).role == "viewer"
    assert refused(home, "Status", pb.StatusRequest(), f"Bearer {changed}").code() == grpc.StatusCode.UNAUTHENTICATED


def test_two_authorizations_are_refused(home: AdminHome) -> None:
    token = home.token()
    with pytest.raises(grpc.RpcError) as caught:
        path = f"/{SERVICE.full_name}/Status"
        headers = [("authorization", f"Bearer {token}"), ("authorization", "Bearer x")]
        home.channel.unary_unary(path)(b"", metadata=headers, timeout=30)
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_an_expired_token_is_refused_with_its_date(home: AdminHome) -> None:
    token = home.token(days=1)
    home.clock.pass_(days=1)
    error = refused(home, "Status", pb.StatusRequest(), f"Bearer {token}")
    assert error.code() == grpc.StatusCode.UNAUTHENTICATED
    assert "expired on" in error.details()


def test_a_token_is_good_until_its_last_second(home: AdminHome) -> None:
    token = home.token(days=1)
    home.clock.pass_(seconds=24 * 3600 - 1)
    assert home.call("Status", pb.StatusRequest(), token)


def test_a_revoked_token_opens_nothing_from_the_next_call_on(home: AdminHome) -> None:
    token = home.token(name="to-revoke")
    assert home.call("Status", pb.StatusRequest(), token)
    assert home.call("RevokeToken", pb.TokenRequest(token="to-revoke")).state == "revoked"
    error = refused(home, "Status", pb.StatusRequest(), f"Bearer {token}")
    assert (error.code(), "revoked" in error.details()) == (grpc.StatusCode.UNAUTHENTICATED, True)


def test_a_new_token_works_and_is_shown_only_once(home: AdminHome) -> None:
    made = home.call("CreateToken", pb.CreateTokenRequest(name="night-shift", role="operator", days=7))
    assert home.call("Status", pb.StatusRequest(), made.secret).token == "night-shift"
    listed = home.call("ListTokens", pb.ListTokensRequest())
    assert "night-shift" in [token.name for token in listed.tokens]
    assert secret_of(made.secret) not in str(listed)
    assert made.token.expires_at.ToDatetime() - made.token.created_at.ToDatetime() == timedelta(days=7)


@pytest.mark.parametrize(
    ("name", "role", "days", "words"),
    [
        ("../x", "viewer", 1, "is no name"),
        ("x", "root", 1, "unknown role"),
        ("x", "viewer", 10_000, "must be 1 to"),
        ("x" * 101, "viewer", 1, "too many"),
    ],
)
def test_a_token_that_cannot_be_made_is_refused(home: AdminHome, name: str, role: str, days: int, words: str) -> None:
    with pytest.raises(grpc.RpcError, match=words) as caught:
        home.call("CreateToken", pb.CreateTokenRequest(name=name, role=role, days=days))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_secrets_are_hashed_at_rest(home: AdminHome) -> None:
    secret = secret_of(home.token())
    with home.registry.reading() as session:
        for table in session.scalars(text("SELECT name FROM sqlite_master WHERE type = 'table'")).all():
            assert secret not in str(session.execute(text(f'SELECT * FROM "{table}"')).all())
        rows = session.scalars(select(Token)).all()
    assert len({row.salt for row in rows}) == len(rows)


# -- roles ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("role", list(Role))
def test_a_role_may_do_what_its_rule_says_and_nothing_else(home: AdminHome, method: str, role: Role) -> None:
    token = home.token(role.label)
    try:
        home.call(method, empty(method), token)
        code = grpc.StatusCode.OK
    except grpc.RpcError as error:
        code = error.code()
    assert (code == grpc.StatusCode.PERMISSION_DENIED) == (role < RULES[method].role)
    assert code not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNIMPLEMENTED)


@pytest.mark.parametrize("method", CHANGING)
def test_a_viewer_who_tries_to_change_something_is_refused_and_written_down(home: AdminHome, method: str) -> None:
    token = home.token("viewer", name=f"viewer-{method}")
    error = refused(home, method, empty(method), f"Bearer {token}")
    assert error.code() == grpc.StatusCode.PERMISSION_DENIED
    entry = audit_log(home)[-1]
    assert (entry.action, entry.token, entry.role) == (method, f"viewer-{method}", "viewer")
    assert entry.outcome.startswith("refused: ")
    assert entry.peer == "127.0.0.1" or entry.peer == "::1"


@pytest.mark.parametrize("method", sorted(set(METHODS) - set(CHANGING)))
def test_looking_leaves_no_trace_in_the_audit_log(home: AdminHome, method: str) -> None:
    before = len(audit_log(home))
    try:
        home.call(method, empty(method))
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.NOT_FOUND
    assert len(audit_log(home)) == before


def test_what_succeeds_and_what_fails_is_written_down_with_who_and_what(home: AdminHome) -> None:
    token = home.token("admin", name="chief")
    home.call("CreateToken", pb.CreateTokenRequest(name="assistant", role="viewer"), token)
    with pytest.raises(grpc.RpcError):
        home.call("CreateToken", pb.CreateTokenRequest(name="assistant", role="viewer"), token)
    good, bad = audit_log(home)[-2:]
    assert (good.token, good.action, good.target, good.outcome) == ("chief", "CreateToken", "assistant", "ok")
    assert good.detail == {"name": "assistant", "role": "viewer", "days": 0}
    assert "there is a token 'assistant' already" in bad.outcome
    shown = home.call("ListAudit", pb.ListAuditRequest(limit=2)).entries
    assert [entry.outcome for entry in shown] == [good.outcome, bad.outcome]


# -- attempts -------------------------------------------------------------------------------------------


def test_after_five_wrong_tokens_an_address_is_turned_away_for_a_minute(home: AdminHome) -> None:
    token = home.token()
    for _ in range(5):
        assert refused(home, "Status", pb.StatusRequest(), "Bearer x").code() == grpc.StatusCode.UNAUTHENTICATED
    # Even with the right one: or guessing would go on.
    error = refused(home, "Status", pb.StatusRequest(), f"Bearer {token}")
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert int(dict(error.trailing_metadata())["retry-after"]) <= 61
    home.clock.pass_(seconds=61)
    assert home.call("Status", pb.StatusRequest(), token)


@given(st.lists(st.floats(0, 100), max_size=30), st.integers(1, 5), st.floats(1, 50))
def test_never_more_failures_than_allowed_in_any_window(pauses: list[float], allowed: int, window: float) -> None:
    time = 0.0
    attempts = Attempts(allowed, window, lambda: time)
    failures: list[float] = []
    for pause in pauses:
        time += pause
        waiting = attempts.wait_for("a")
        if waiting == 0:
            attempts.failed("a")
            failures.append(time)
        else:
            assert 0 < waiting <= window + 1e-9
        assert attempts.wait_for("b") == 0
    for start in failures:
        assert sum(start <= moment < start + window for moment in failures) <= allowed


def test_millions_of_addresses_do_not_fill_the_memory() -> None:
    attempts = Attempts()
    for number in range(20_000):
        attempts.failed(str(number))
    assert len(attempts._failures) == 10_000
    assert attempts.wait_for("0") == 0


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.7:4711", "10.0.0.7"),
        ("ipv6:%5B2001:db8::1%5D:4711", "2001:db8::1"),
        ("ipv6:[::1]:4711", "::1"),
        ("unix:/tmp/x\n", "unix:/tmp/x\\n"),
    ],
)
def test_an_address_is_told_without_its_port(peer: str, address: str) -> None:
    assert address_of(peer) == address


# -- messages -------------------------------------------------------------------------------------------


def test_an_oversized_message_is_refused_unread(home: AdminHome) -> None:
    error = refused(home, "Status", b"\x0a" + b"A" * (LARGEST_MESSAGE + 1), f"Bearer {home.token()}")
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert home.call("Status", pb.StatusRequest())


def test_oversized_headers_are_refused(home: AdminHome) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        home.call("Status", pb.StatusRequest(), x="A" * 100_000)
    assert caught.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
    assert home.call("Status", pb.StatusRequest())


@pytest.mark.parametrize(
    "content", [b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x05abc", b"\x0b" * 200, b"\x0a\x01\xff"]
)
@pytest.mark.parametrize("method", ["GetRun", "StartRun", "CreateToken", "ExportModel"])
def test_a_malformed_message_is_an_invalid_argument(home: AdminHome, method: str, content: bytes) -> None:
    error = refused(home, method, content, f"Bearer {home.token()}")
    assert error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
    if content == b"\xff":
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_a_stranger_does_not_reach_the_parser(home: AdminHome) -> None:
    assert refused(home, "StartRun", b"\xff\xff", None).code() == grpc.StatusCode.UNAUTHENTICATED


@given(st.binary(max_size=200), st.sampled_from([m for m in METHODS if m not in ("Backup", "Doctor", "StartRun")]))
def test_no_message_makes_the_service_fail(shared_home: AdminHome, content: bytes, method: str) -> None:
    try:
        shared_home.call(method, content)
    except grpc.RpcError as error:
        assert error.code() in (
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.NOT_FOUND,
            grpc.StatusCode.FAILED_PRECONDITION,
        )
        assert error.details().isprintable()


# -- names, logs ----------------------------------------------------------------------------------------

TRAVERSALS = ["../../etc/passwd", "..", "/etc/passwd", "a/../../b", "..\\..\\x", "a\x00b", "%2e%2e%2f", ".ssh", ""]


@pytest.mark.parametrize("name", [name for name in TRAVERSALS if name])
def test_no_name_leads_out_of_its_folder(home: AdminHome, name: str) -> None:
    secret = home.home / "server.toml"
    assert secret.exists()
    for method, request in (
        ("DownloadBackup", pb.BackupName(name=name)),
        ("Restore", pb.BackupName(name=name)),
        ("StartRun", pb.StartRunRequest(name=name, scenario="demo", method="local")),
        ("StartRun", pb.StartRunRequest(scenario=name, method="local")),
        ("ExportModel", pb.ModelRequest(run=name)),
        ("GetRun", pb.RunRequest(run=name)),
        ("GetClient", pb.ClientRequest(name=name)),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            home.call(method, request)
        assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND), method
        assert caught.value.details().isprintable()
    assert not [asked for asked in home.flower.asked if asked[0] == "start"]


def test_a_backup_that_is_a_link_to_elsewhere_is_not_sent(home: AdminHome, tmp_path: Path) -> None:
    folder = home.home / "backups"
    folder.mkdir(exist_ok=True)
    link = folder / "registry-0001-x.jsonl.gz"
    link.symlink_to(home.home / "pki" / "ca.key")
    with pytest.raises(grpc.RpcError, match="no backup"):
        home.call("DownloadBackup", pb.BackupName(name=link.name))
    link.unlink()


def test_a_scenario_file_of_the_server_cannot_be_named(home: AdminHome) -> None:
    with pytest.raises(grpc.RpcError, match="send its content"):
        home.call("StartRun", pb.StartRunRequest(scenario="secret.toml", method="local"))


def test_nothing_a_caller_sends_can_forge_a_log_line(home: AdminHome, caplog: pytest.LogCaptureFixture) -> None:
    forged = "x\n2026-12-01 INFO CreateToken by root: ok\x1b[2J\u202e"
    with caplog.at_level(logging.INFO, "edgeduet"):
        for method, request in (
            ("CreateToken", pb.CreateTokenRequest(name=forged, role="admin")),
            ("RevokeToken", pb.TokenRequest(token=forged)),
            ("StartRun", pb.StartRunRequest(name=forged, scenario="demo", method=forged)),
            ("SetConfig", pb.SetConfigRequest(run=forged, key=forged, value_json=forged)),
            ("ApproveClient", pb.ApproveClientRequest(request=forged, code=forged)),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                home.call(method, request)
            assert caught.value.details().isprintable()
    assert caplog.records
    assert all(record.getMessage().isprintable() for record in caplog.records)
    for entry in audit_log(home)[-5:]:
        assert entry.outcome.isprintable()
        assert entry.target.isprintable()
        assert "\\n" in json.dumps(entry.detail) or entry.detail == {}


def test_no_token_is_ever_logged_or_audited(home: AdminHome, caplog: pytest.LogCaptureFixture) -> None:
    token = home.token()
    with caplog.at_level(logging.DEBUG):
        made = home.call("CreateToken", pb.CreateTokenRequest(name="quiet", role="admin"), token)
        refused(home, "CreateToken", pb.CreateTokenRequest(), f"Bearer {token[:-1]}")
    seen = caplog.text + "".join(f"{entry.detail}{entry.outcome}" for entry in audit_log(home))
    for secret in (token, made.secret):
        assert secret_of(secret)[:-1] not in seen


# -- the connection -------------------------------------------------------------------------------------


def test_the_service_speaks_tls_only(home: AdminHome) -> None:
    with grpc.insecure_channel(f"localhost:{home.port}") as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/{SERVICE.full_name}/Status")(b"", timeout=10)
    assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def test_old_tls_is_refused(home: AdminHome) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with socket.create_connection(("localhost", home.port), 10) as plain, pytest.raises(OSError):
        context.wrap_socket(plain, server_hostname="localhost")


def test_a_client_with_another_authority_does_not_connect(home: AdminHome, tmp_path: Path) -> None:
    from edgeduet_server.deployment.pki import Pki

    Pki(tmp_path / "pki").create(["localhost"])
    credentials = grpc.ssl_channel_credentials((tmp_path / "pki" / "ca.crt").read_bytes())
    with grpc.secure_channel(f"localhost:{home.port}", credentials) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/{SERVICE.full_name}/Status")(b"", timeout=20)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


def test_health_is_open_and_says_serving(home: AdminHome) -> None:
    answer = health_pb2_grpc.HealthStub(home.channel).Check(health_pb2.HealthCheckRequest(service=SERVICE.full_name))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("wanted", [False, True])
def test_reflection_is_off_unless_it_is_switched_on(tmp_path: Path, wanted: bool) -> None:
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    with admin_home(tmp_path / "home", admin_reflection=wanted) as made:
        stub = reflection_pb2_grpc.ServerReflectionStub(made.channel)
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        if wanted:
            names = [
                s.name
                for answer in stub.ServerReflectionInfo(iter([question]))
                for s in answer.list_services_response.service
            ]
            assert SERVICE.full_name in names
        else:
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.ServerReflectionInfo(iter([question])))
            assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
