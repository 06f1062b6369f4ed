"""The proxy in front of Flower's SuperLink: devices reach ``/v1/fleet/`` and nothing else.

Flower 1.42 serves three interfaces on one port: Fleet for devices, Control for operators and Runtime for
its own processes. Control asks for no login, and whoever reaches it can run code on every device
(``methods/flower.md`` 2.2). So SuperLink listens on loopback, and nginx passes on what devices need. The
same configuration for a proxy of your own is in ``deploy/proxy``.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from edgeduet_server.deployment.refusals import LOG_FORMAT
from edgeduet_server.deployment.server_config import ServerConfig
from edgeduet_shared.atomic_files import atomic_write_text
from edgeduet_shared.errors import ConfigError
from edgeduet_shared.versions import HEADER, installed_versions, versions_text

# Paths that a second server might read in another way than nginx did: refused before anything is matched.
_AMBIGUOUS = r"([.][.]|%|//|\x5c)"

_TEMPLATE = """\
# Written by edgeduet-server at every start; change server.toml instead.
worker_processes 1;
pid {folder}/nginx.pid;
# Devices that do not accept the server's certificate are worth no more than an "info" to nginx.
error_log stderr info;
daemon off;

events {{
    worker_connections 2048;
}}

http {{
    access_log off;
    # Who is turned away, for `edgeduet-admin status`.
    log_format refused '{refused}';
    map $status $is_refused {{
        401 1;
        403 1;
        412 1;
        default 0;
    }}
    server_tokens off;
    client_max_body_size {max_request_bytes};
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;

    upstream superlink {{
        server 127.0.0.1:{superlink_port};
        keepalive 32;
    }}

    server {{
        listen {public_host}:{public_port} ssl;
        ssl_certificate {pki}/server.crt;
        ssl_certificate_key {pki}/server.key;
        ssl_protocols TLSv1.2 TLSv1.3;
        ssl_session_cache shared:devices:2m;
        # `edgeduet-client doctor` compares them with its own.
        add_header {header} "{versions}" always;

        if ($request_uri ~ "{ambiguous}") {{
            return 404;
        }}

        location ^~ /v1/fleet/ {{
            access_log /dev/stderr refused if=$is_refused;
            proxy_pass https://superlink;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header Host $host;
            proxy_ssl_trusted_certificate {pki}/ca.crt;
            proxy_ssl_verify on;
            proxy_ssl_name localhost;
            proxy_ssl_session_reuse on;
            proxy_read_timeout 300s;
            proxy_request_buffering off;
        }}

        location = /v1/fleet {{
            return 404;
        }}

        location / {{
            return 404;
        }}
    }}
}}
"""


def nginx_configuration(config: ServerConfig) -> str:
    """Return the configuration of nginx for a server home."""
    network = config.network
    return _TEMPLATE.format(
        folder=config.folder("proxy"),
        pki=config.folder("pki"),
        max_request_bytes=config.limits.max_request_bytes,
        superlink_port=network.superlink_port,
        public_host=f"[{network.public_host}]" if ":" in network.public_host else network.public_host,
        public_port=network.public_port,
        ambiguous=_AMBIGUOUS,
        header=HEADER,
        versions=versions_text(installed_versions()),
        refused=LOG_FORMAT,
    )


def proxy_command(config: ServerConfig) -> list[str]:
    """Write nginx's configuration and return the command that runs it.

    Raises:
        ConfigError: nginx is not installed.
    """
    folder = config.folder("proxy")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "nginx.conf"
    atomic_write_text(path, nginx_configuration(config))
    return [find_nginx(), "-c", str(path), "-p", str(folder)]


def find_nginx() -> str:
    """Return the path of nginx.

    Raises:
        ConfigError: it is not installed.
    """
    found = shutil.which("nginx") or next((path for path in ("/usr/sbin/nginx",) if Path(path).is_file()), None)
    if found is None:
        raise ConfigError(
            'nginx is not installed, and [network] proxy = "nginx" needs it; install it (apt install nginx-light), '
            'or set proxy = "external" and run one of deploy/proxy in front of SuperLink'
        )
    return found
