"""The way to an admin service: where it is, whom to trust, which token; kept in a private file of the user.

A token is asked for, read from standard input or a file, or taken from the environment; never from the command line,
which every user of the machine can read.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs

from edgeduet_shared.atomic_files import write_failure
from edgeduet_shared.errors import ConfigError, EdgeDuetError

if TYPE_CHECKING:
    import grpc
    from google.protobuf.message import Message

TOKEN_VARIABLE = "EDGEDUET_ADMIN_TOKEN"
CONFIG_VARIABLE = "EDGEDUET_ADMIN_CONFIG"
DEFAULT_PORT = 9445
_SERVICE = "edgeduet.admin.v1.Admin"
_CALL_SECONDS = 180.0
_COMPLETION_SECONDS = 2.0


class AdminError(EdgeDuetError):
    """The admin service cannot be reached, or refuses."""


@dataclass(frozen=True)
class Profile:
    """What ``login`` keeps.

    Attributes:
        server: ``HOST:PORT``.
        ca: the authority's certificate, PEM.
        token: the bearer token.
    """

    server: str
    ca: str
    token: str


def profile_path() -> Path:
    """Return where the profile is kept."""
    chosen = os.environ.get(CONFIG_VARIABLE)
    return Path(chosen) if chosen else platformdirs.user_config_path("edgeduet") / "admin.json"


def save_profile(profile: Profile) -> Path:
    """Keep a profile so that only its owner can read it.

    Raises:
        EdgeDuetError: it cannot be written.
    """
    path = profile_path()
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(profile), file)
        os.replace(partial, path)
    except OSError as error:
        raise write_failure(path, error) from error
    finally:
        partial.unlink(missing_ok=True)
    return path


def load_profile() -> Profile:
    """Return the profile; a token in the environment takes the place of the one kept.

    Raises:
        ConfigError: there is none, it is damaged, or others can read it.
    """
    path = profile_path()
    try:
        mode = path.stat().st_mode
        profile = Profile(**json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        raise ConfigError("not logged in; first: edgeduet-admin login --server HOST:PORT --ca ca.crt") from None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); log in again") from error
    if os.name != "nt" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{path}: others can read the token in it; chmod 600 {path}, and have the token replaced")
    token = os.environ.get(TOKEN_VARIABLE)
    return Profile(profile.server, profile.ca, token) if token else profile


def parse_server(text: str) -> str:
    """Return ``HOST:PORT``; the port may be left out.

    Raises:
        ConfigError: not an address.
    """
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(DEFAULT_PORT)
    if not host or not port.isdigit() or not 0 < int(port) < 65536 or "/" in host:
        raise ConfigError(f"--server {text!a}: expected HOST:PORT, for example fl.example.org:{DEFAULT_PORT}")
    return f"{host}:{port}"


class AdminClient:
    """Calls the admin service.

    Args:
        profile: where it is and how to get in.
        limit: seconds a call may take.
    """

    def __init__(self, profile: Profile, limit: float = _CALL_SECONDS) -> None:
        import grpc

        self._server = profile.server
        self._limit = limit
        self._headers = (("authorization", f"Bearer {profile.token}"),)
        credentials = grpc.ssl_channel_credentials(profile.ca.encode())
        self._channel = grpc.secure_channel(
            profile.server, credentials, options=[("grpc.max_receive_message_length", 64_000_000)]
        )

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def call(self, method: str, request: Message) -> Any:
        """Return the answer.

        Raises:
            AdminError: the service cannot be reached, or refuses.
        """
        import grpc

        answer = _answer_type(method)
        ask: Any = self._channel.unary_unary(
            f"/{_SERVICE}/{method}", lambda message: message.SerializeToString(), answer.FromString
        )
        try:
            return ask(request, metadata=self._headers, timeout=self._limit)
        except grpc.RpcError as error:
            raise self._explain(error) from error

    def download(self, method: str, request: Message) -> tuple[str, bytes]:
        """Return name and content of a file, checked.

        Raises:
            AdminError: the service refuses, or the file is not whole.
        """
        import grpc

        answer = _answer_type(method)
        ask: Any = self._channel.unary_stream(
            f"/{_SERVICE}/{method}", lambda message: message.SerializeToString(), answer.FromString
        )
        try:
            chunks: Iterator[Any] = ask(request, metadata=self._headers, timeout=self._limit)
            head = next(chunks)
            content = b"".join([head.content, *(chunk.content for chunk in chunks)])
        except grpc.RpcError as error:
            raise self._explain(error) from error
        if len(content) != head.size or hashlib.sha256(content).hexdigest() != head.sha256:
            raise AdminError(f"{head.name} arrived damaged; try again")
        return head.name, content

    def _explain(self, error: grpc.RpcError) -> AdminError:
        import grpc

        code, details = error.code(), error.details() or ""
        if code == grpc.StatusCode.UNAVAILABLE and ("connect" in details or "andshake" in details or not details):
            if "CERTIFICATE_VERIFY_FAILED" in details:
                return AdminError(
                    f"{self._server} shows a certificate that the CA given at login did not sign, or one for another "
                    "name or time; use the server's own ca.crt and one of its public names, and check the clock"
                )
            if "andshake" in details or "SSL" in details:
                return AdminError(
                    f"{self._server} does not speak TLS as expected; is this the port of the admin service?"
                )
            return AdminError(
                f"{self._server} cannot be reached; check address and port, and that edgeduet-server runs"
            )
        if code == grpc.StatusCode.UNIMPLEMENTED:
            return AdminError(f"{self._server} has another version of edgeduet than this command; install the same")
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return AdminError(f"{self._server} did not answer within {self._limit:.0f} s; see its logs/admin.log")
        return AdminError(details or f"{self._server} refused ({code.name})")


def complete(method: str, request: Message) -> Any:
    """Return an answer for shell completion, or None: whoever presses TAB wants no error."""
    try:
        with AdminClient(load_profile(), _COMPLETION_SECONDS) as client:
            return client.call(method, request)
    except EdgeDuetError:
        return None


def _answer_type(method: str) -> Any:
    from google.protobuf.message_factory import GetMessageClass

    from edgeduet_shared.admin_api import admin_pb2

    service = admin_pb2.DESCRIPTOR.services_by_name["Admin"]
    return GetMessageClass(service.methods_by_name[method].output_type)
