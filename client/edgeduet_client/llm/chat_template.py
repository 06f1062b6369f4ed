"""Chat templates, rendered as ``transformers`` renders them.

A template comes with the model, from anywhere: it runs in jinja2's immutable sandbox, and sees plain JSON values only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from edgeduet_client.llm.errors import ModelError, RequestError

# Older releases have known ways out of the sandbox.
_OLDEST_JINJA = (3, 1, 6)


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the jinja2 text.
        special_tokens: names that templates use, such as ``bos_token`` and ``eos_token``.

    Raises:
        ModelError: jinja2 is missing or too old, or the text is no template.
    """

    def __init__(self, source: str, *, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._template = _compile(source)

    @classmethod
    def read(cls, path: Path, *, special_tokens: Mapping[str, str] | None = None) -> ChatTemplate | None:
        """Return the template stored at ``path``, or ``None`` where there is no such file."""
        if not path.is_file():
            return None
        return cls(path.read_text("utf-8"), special_tokens=special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """Return ``messages`` as one text.

        Args:
            messages: each with a role and its content; what is ``None`` counts as not there.
            add_generation_prompt: end with the beginning of the assistant's turn.

        Raises:
            RequestError: the template refuses the messages (a role it does not know, turns out of order) or breaks
                on them.
        """
        import jinja2

        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            # JSON there and back: the template gets no object it could call.
            return str(
                self._template.render(
                    messages=json.loads(json.dumps(plain)),
                    tools=None,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **self._special_tokens,
                )
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {error}; check their roles and their order",
                field="messages",
            ) from error


def _compile(source: str) -> Any:
    try:
        import jinja2
        import jinja2.ext
        import jinja2.nodes
        import jinja2.sandbox
    except ImportError as error:
        raise ModelError(f"chat templates need jinja2 ({error}); pip install 'edgeduet[llm]'") from error
    if tuple(int(part) for part in jinja2.__version__.split(".")[:3] if part.isdigit()) < _OLDEST_JINJA:
        raise ModelError(f"jinja2 {jinja2.__version__} has known holes in its sandbox; pip install -U 'jinja2>=3.1.6'")

    class GenerationBlock(jinja2.ext.Extension):
        """``{% generation %}`` marks what the assistant said, for training; here it is just its content."""

        tags = {"generation"}  # noqa: RUF012 (declared without ClassVar by jinja2)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _time_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(
            f"the model's chat template does not compile (line {error.lineno}: {error.message})"
        ) from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _time_now(layout: str) -> str:
    return datetime.now().strftime(layout)
