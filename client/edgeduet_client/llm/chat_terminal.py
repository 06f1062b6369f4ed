"""A chat on a terminal, or over a pipe: what ``llm chat`` does.

Nothing of it is written to disk, neither what was said nor what was typed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from edgeduet_client.llm.chat import Conversation
from edgeduet_client.llm.errors import RequestError
from edgeduet_client.llm.generate import Finished
from edgeduet_client.llm.interrupt_key import stops_on_interrupt
from edgeduet_client.llm.local_model import LocalModel
from edgeduet_client.llm.model_folder import ModelFolder
from edgeduet_client.llm.request import GenerationRequest, request_with_defaults
from edgeduet_client.llm.settings import usable_defaults
from edgeduet_client.llm.speculation.options import SpeculationOptions

_HELP = """\
/reset          forget the conversation
/system TEXT    begin anew under this system message; without TEXT, under none
/exit           end (as does Ctrl-D); Ctrl-C stops an answer"""
_LONGEST_ANSWER = 512


def run_chat(
    model: str,
    settings: Mapping[str, Any],
    *,
    system: str | None = None,
    root: Path | None = None,
    threads: int | None = None,
    speculation: SpeculationOptions | None = None,
) -> None:
    """Answer every line of standard input until it ends or says /exit.

    Raises:
        ModelError: the model cannot be loaded.
        RequestError: the model has no chat template, or (not on a terminal) a message cannot be answered.
    """
    folder = ModelFolder.open(model, root)
    local = LocalModel.open(folder, threads=threads, speculation=speculation)
    limit = local.session.cache_shape.limit
    given = {"max_tokens": min(_LONGEST_ANSWER, max(1, limit // 4)), **settings}
    request = request_with_defaults(given, usable_defaults(folder.generation_defaults()))
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    chat = _Chat(local, request, system, terminal)
    if terminal:
        print(f"{folder.name}; /help lists the commands", file=sys.stderr)
    for line in _typed_lines() if terminal else _piped_lines():
        if not chat.take(line):
            break


class _Chat:
    def __init__(self, model: LocalModel, request: GenerationRequest, system: str | None, terminal: bool) -> None:
        self._model = model
        self._request = request
        self._system = system
        self._terminal = terminal
        self._conversation = Conversation(model, system=system)
        self._told: set[str] = set()

    def take(self, line: str) -> bool:
        """Act on one line; return whether to go on."""
        word, _, rest = line.strip().partition(" ")
        if word in ("/exit", "/quit"):
            return False
        if word == "/reset":
            self._begin(self._system)
        elif word == "/system":
            self._begin(rest.strip() or None)
        elif word == "/help":
            print(_HELP, file=sys.stderr)
        elif word.startswith("/"):
            print(f"no command {word}; /help lists them", file=sys.stderr)
        elif line.strip():
            self._answer(line)
        return True

    def _begin(self, system: str | None) -> None:
        self._system = system
        self._conversation = Conversation(self._model, system=system)
        if self._terminal:
            print("new conversation", file=sys.stderr)

    def _answer(self, message: str) -> None:
        try:
            with stops_on_interrupt() as stop:
                for event in self._conversation.reply(message, self._request, cancel=stop):
                    if isinstance(event, Finished):
                        self._close(event)
                    else:
                        sys.stdout.write(event.text)
                        sys.stdout.flush()
        except RequestError as error:
            if not self._terminal:
                raise
            print(f"error: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            if not self._terminal:
                raise
            print()

    def _close(self, finished: Finished) -> None:
        print()
        if self._conversation.left_out:
            print(f"(the oldest {self._conversation.left_out} messages no longer fit)", file=sys.stderr)
        if self._terminal and finished.reason != "stop":
            print(f"({finished.reason})", file=sys.stderr)
        for line in finished.speculation.messages() if finished.speculation is not None else ():
            # Once is enough: the numbers in it change with every answer, its beginning does not.
            if line.partition(":")[0] not in self._told:
                self._told.add(line.partition(":")[0])
                print(f"({line})", file=sys.stderr)
        if finished.reason == "cancelled" and not self._terminal:
            raise KeyboardInterrupt


def _typed_lines() -> Iterator[str]:
    with suppress(ImportError):  # not on every system; lines can be typed without it
        import readline  # noqa: F401 - gives input() editing and history, in memory only
    while True:
        try:
            yield input("> ")
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D ends)", file=sys.stderr)


def _piped_lines() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode("utf-8").rstrip("\n")
        except UnicodeDecodeError as error:
            raise RequestError(
                f"line {number} of standard input is not valid UTF-8 at byte {error.start}", "messages"
            ) from error
