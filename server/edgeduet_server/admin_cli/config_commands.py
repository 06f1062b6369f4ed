"""``edgeduet-admin config``: settings of a run."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from edgeduet_server.admin_cli.asking import (
    ask,
    compact,
    tell,
)
from edgeduet_server.admin_cli.options import (
    TYPER_SETTINGS,
    JsonOption,
    RunOption,
    complete_setting,
)
from edgeduet_shared.errors import ConfigError

config_app = typer.Typer(help="Settings of a run.", **TYPER_SETTINGS)


@config_app.command("get")
def config_get(
    key: Annotated[
        str, typer.Argument(metavar="[KEY]", help="A setting or the beginning of some; nothing = all.")
    ] = "",
    run: RunOption = "",
    json: JsonOption = False,
) -> None:
    """Show settings of a run, and which can be changed while it goes on.

    Example: `edgeduet-admin config get train`
    """
    from edgeduet_server.admin_cli import screen
    from edgeduet_server.admin_cli.views import config_view
    from edgeduet_shared.admin_api import admin_pb2 as pb
    from edgeduet_shared.errors import nearest

    found = ask("GetConfig", pb.RunRequest(run=run))
    chosen = [entry for entry in found["settings"] if entry["key"].startswith(key)]
    if not chosen:
        raise ConfigError(f"no setting '{key}'{nearest(key, [entry['key'] for entry in found['settings']])}")
    screen.show(lambda: {**found, "settings": chosen}, config_view, as_json=json, watch=0)


@config_app.command("set")
def config_set(
    setting: Annotated[
        str, typer.Argument(metavar="KEY=VALUE", help="KEY= takes a change back.", autocompletion=complete_setting)
    ],
    run: RunOption = "",
    json: JsonOption = False,
) -> None:
    """Change a setting of a run from the next round on.

    Examples:

    * `edgeduet-admin config set train.lr=0.0005`
    * `edgeduet-admin config set train.lr=`
    """
    from edgeduet_shared.admin_api import admin_pb2 as pb

    key, equals, text = setting.partition("=")
    if not equals:
        raise ConfigError(f"config set {setting}: expected KEY=VALUE, for example train.lr=0.0005")
    request = pb.SetConfigRequest(run=run, key=key, value_json=compact(_toml_value(text)) if text else "")
    found = ask("SetConfig", request)
    value = next(compact(entry["value"]) for entry in found["settings"] if entry["key"] == key)
    tell(found, json, f"run {found['run']}: {key} = {value} from the next round on")


def _toml_value(text: str) -> Any:
    import tomllib

    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text
