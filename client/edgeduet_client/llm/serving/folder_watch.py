"""Whether the model folder on disk still is the one that was loaded.

Decision: what is loaded finishes what it has begun, whatever happens to the folder, because all it needs is in
memory. New requests are refused from then on: an answer of a model that its owner replaced or removed would be
wrong without a sign of it. Where the very same folder comes back, so do the answers.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from edgeduet_client.llm.serving.refusals import ModelChanged


class FolderWatch:
    """Compares the manifest with the one seen first; the manifest holds the checksums of all files.

    Args:
        manifest: path of the manifest of the loaded folder.
    """

    def __init__(self, manifest: Path) -> None:
        self._manifest = manifest
        self._stamp = _stamp(manifest)
        self._digest = _digest(manifest)

    def check(self) -> None:
        """Check once more; costs one ``stat`` while nothing changes.

        Raises:
            ModelChanged: the manifest is another one, or gone.
        """
        folder = self._manifest.parent
        try:
            stamp = _stamp(self._manifest)
            if stamp == self._stamp:
                return
            same = _digest(self._manifest) == self._digest
        except OSError as error:
            raise ModelChanged(
                f"the model folder {folder} is gone or unreadable since it was loaded; restore it, or stop this server"
            ) from error
        if not same:
            raise ModelChanged(f"the model folder {folder} changed since it was loaded; restart this server to use it")
        self._stamp = stamp


def _stamp(path: Path) -> tuple[int, int, int]:
    state = path.stat()
    return state.st_ino, state.st_size, state.st_mtime_ns


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
