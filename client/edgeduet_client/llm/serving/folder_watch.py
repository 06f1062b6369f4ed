"""Whether the model folder on disk still is the one that was loaded.

Decision: what is loaded finishes what it has begun, whatever happens to the folder, because all it needs is in
memory. New requests are refused from then on: an answer of a model that its owner replaced or removed would be
wrong without a sign of it. Where the very same folder comes back, so do the answers.
"""

from __future__ import annotations

from pathlib import Path

from edgeduet_client.llm.model_folder import MANIFEST, ModelFolder, file_sha256
from edgeduet_client.llm.serving.refusals import ModelChanged


class FolderWatch:
    """Compares the folder with what it was when this was made.

    A look at size and time of every file the manifest names; the manifest is read again only when its own changed.
    It holds the checksums of all files, so the same manifest is the same model.

    Attributes:
        digest: checksum of the manifest.
    """

    def __init__(self, folder: ModelFolder) -> None:
        self._folder = folder
        self._files = [folder.file(name) for name in (MANIFEST, *folder.manifest.files)]
        self._stamps = [_stamp(file) for file in self._files]
        self.digest = file_sha256(folder.file(MANIFEST))

    def check(self) -> None:
        """Look once more.

        Raises:
            ModelChanged: the manifest is another one, or a file is gone or was written to.
        """
        try:
            stamps = [_stamp(file) for file in self._files]
            if stamps == self._stamps:
                return
            same = file_sha256(self._files[0]) == self.digest and all(
                stamp[1] == facts.bytes
                for stamp, facts in zip(stamps[1:], self._folder.manifest.files.values(), strict=True)
            )
        except OSError as error:
            raise ModelChanged(
                f"the model folder {self._folder.path} is gone or incomplete since it was loaded; "
                "restore it, or stop this server"
            ) from error
        if not same:
            raise ModelChanged(
                f"the model folder {self._folder.path} changed since it was loaded; restart this server to use it"
            )
        self._stamps = stamps


def _stamp(path: Path) -> tuple[int, int, int]:
    state = path.stat()
    return state.st_ino, state.st_size, state.st_mtime_ns
