"""How well a model predicts texts: what ``llm eval`` does."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgeduet_client.llm.errors import RequestError
from edgeduet_client.llm.import_checks import perplexity
from edgeduet_client.llm.local_model import LocalModel

EVAL_HEAD = ("text", "tokens", "perplexity", "bits per byte")
Progress = Callable[[str, int, int], None]


def evaluate_texts(
    model: str,
    texts: Sequence[Path],
    *,
    window: int,
    root: Path | None = None,
    threads: int | None = None,
    progress: Progress = lambda what, done, total: None,
) -> list[dict[str, Any]]:
    """Return perplexity and bits per byte of every file.

    A text is read in windows of ``window`` tokens, each from an empty context; the first token of a window is not
    predicted and not counted.

    Raises:
        ModelError: the model cannot be loaded.
        RequestError: a file cannot be read, is not UTF-8 or too short, or the window exceeds the context.
    """
    local = LocalModel.open(model, root, threads=threads)
    if window > local.session.cache_shape.limit:
        raise RequestError(
            f"--window {window} is more than the model's context of {local.session.cache_shape.limit} tokens", "window"
        )
    return [_evaluate(local, file, window, progress) for file in texts]


def eval_row(result: Mapping[str, Any]) -> tuple[str, ...]:
    """Return one result as a row under :data:`EVAL_HEAD`."""
    return (
        result["text"],
        str(result["tokens"]),
        f"{result['perplexity']:.3f}",
        f"{result['bits_per_byte']:.4f}",
    )


def _evaluate(local: LocalModel, file: Path, window: int, progress: Progress) -> dict[str, Any]:
    ids = local.tokenizer.encode_prompt(_read(file))
    windows = [ids[start : start + window] for start in range(0, len(ids), window)]
    windows = [part for part in windows if len(part) > 1]
    if not windows:
        raise RequestError(f"{file} has fewer than two tokens; give a longer text", "texts")
    surprise, predicted, length, done = 0.0, 0, 0, 0
    for part in windows:
        before = done

        def tell(read: int, total: int, before: int = before) -> None:
            progress(file.name, before + read, len(ids))

        surprise += math.log(perplexity(local.session, part, tell)) * (len(part) - 1)
        predicted += len(part) - 1
        length += sum(len(local.tokenizer.token_bytes(token)) for token in part[1:])
        done += len(part)
    return {
        "text": str(file),
        "tokens": predicted,
        "perplexity": math.exp(surprise / predicted),
        "bits_per_byte": surprise / math.log(2) / max(length, 1),
        "window": window,
    }


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{file} is not valid UTF-8 at byte {error.start}", "texts") from error
    except OSError as error:
        raise RequestError(f"cannot read {file}: {error.strerror}", "texts") from error
