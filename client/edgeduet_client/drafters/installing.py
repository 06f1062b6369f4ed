"""A device puts the drafters it holds into use: the language model finds them in its folder. Never costs the reply."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from edgeduet_client.drafters.kind import Arrays, DrafterKind, Parameters
from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.model_folder import ModelFolder
from edgeduet_client.llm.speculation.drafter_artefact import drafters_root, remove_drafter
from edgeduet_shared.config import DrafterConfig

log = logging.getLogger("edgeduet.client")

PREFIX = "federated-"
"""Names of drafters that came from a federation begin so."""


def install_pool(pool: Mapping[str, Parameters], data: Arrays, kind: DrafterKind, config: DrafterConfig) -> list[str]:
    """Install every drafter of ``pool`` as ``federated-NAME``, and remove those of an earlier pool.

    Returns:
        What went wrong, a line per drafter; the others are in use.
    """
    problems = []
    for name, parameters in pool.items():
        try:
            kind.install(PREFIX + name, parameters, data, config)
        except Exception as error:
            # The federation must not lose a client because its disk is full or its exporter is missing.
            log.exception("the drafter '%s' was not installed", name)
            problems.append(f"{name}: {type(error).__name__}: {error}")
    folder = ModelFolder.open(config.target)
    for path in sorted(drafters_root(folder).glob(f"{PREFIX}*")):
        if path.name.removeprefix(PREFIX) not in pool:
            try:
                remove_drafter(folder, path.name)
            except ModelError as error:
                problems.append(f"{path.name}: {error}")
    return problems
