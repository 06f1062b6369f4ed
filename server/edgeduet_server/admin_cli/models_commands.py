"""``edgeduet-admin models``: the global model after each stage."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from edgeduet_server.admin_cli.asking import (
    admin_client,
    ask,
    confirm,
    show,
    tell,
)
from edgeduet_server.admin_cli.options import (
    TYPER_SETTINGS,
    JsonOption,
    RunArgument,
    StageOption,
    YesOption,
)

models_app = typer.Typer(help="The global model after each stage.", **TYPER_SETTINGS)


@models_app.command("list")
def models_list(run: RunArgument = "", json: JsonOption = False) -> None:
    """List models; without a run, those of all runs.

    Example: `edgeduet-admin models list`
    """
    from edgeduet_server.admin_cli.views import models_view
    from edgeduet_shared.admin_api import admin_pb2 as pb

    show("ListModels", pb.ListModelsRequest(run=run), models_view, json)


@models_app.command("export")
def models_export(
    run: RunArgument = "",
    stage: StageOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to.  [default: RUN-stage-NNN.safetensors here]")
    ] = None,
    promoted: Annotated[bool, typer.Option("--promoted", help="The model that is promoted.")] = False,
) -> None:
    """Bring a model here, as safetensors; its metadata says what it is.

    Examples:

    * `edgeduet-admin models export night-1 --stage 2 --out model.safetensors`
    * `edgeduet-admin models export --promoted`
    """
    from edgeduet_shared.atomic_files import atomic_write_bytes
    from edgeduet_shared.errors import ConfigError
    from edgeduet_shared.names import check_name

    if promoted and (run or stage is not None):
        raise ConfigError("--promoted names a model already; leave run and --stage out")
    with admin_client() as client:
        name, content = client.download("ExportModel", _model(run, stage, promoted=promoted))
    target = out or Path(check_name(name[:100], "file name from the server"))
    atomic_write_bytes(target, content)
    typer.echo(f"written: {target} ({len(content)} bytes)")


@models_app.command("promote")
def models_promote(run: RunArgument = "", stage: StageOption = None, json: JsonOption = False) -> None:
    """Make a model the one that is used (models/current.safetensors on the server).

    Example: `edgeduet-admin models promote night-1`
    """
    done = ask("PromoteModel", _model(run, stage))
    tell(done, json, f"promoted: run {done['run']}, stage {done['stage'] + 1}")


@models_app.command("rollback")
def models_rollback(yes: YesOption = False, json: JsonOption = False) -> None:
    """Go back to the model that was promoted before.

    Example: `edgeduet-admin models rollback`
    """
    from edgeduet_shared.admin_api import admin_pb2 as pb

    confirm("Put the model that was promoted before back in place?", yes)
    done = ask("RollbackModel", pb.RollbackModelRequest())
    now = done["promoted"]
    tell(done, json, f"in use now: run {now['run']}, stage {now['stage'] + 1}" if now else "no model is promoted now")


def _model(run: str, stage: int | None, *, promoted: bool = False) -> Any:
    from edgeduet_shared.admin_api import admin_pb2 as pb

    return pb.ModelRequest(run=run, stage=None if stage is None else stage - 1, promoted=promoted)
