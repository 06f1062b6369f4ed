"""How fast a model is on this machine: what ``llm bench`` does.

Each round reads a prompt of real text into an empty cache and writes an answer of a fixed length (an end-of-text
token is not drawn), so that rounds are alike. Medians, because a busy machine makes single rounds slow.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edgeduet_client.llm.errors import RequestError
from edgeduet_client.llm.generate import Finished
from edgeduet_client.llm.import_checks import check_text
from edgeduet_client.llm.local_model import LocalModel
from edgeduet_client.llm.model_folder import ModelFolder
from edgeduet_client.llm.model_tables import human_bytes
from edgeduet_client.llm.request import GenerationRequest
from edgeduet_client.llm.speculation.options import SpeculationOptions


def bench_model(
    model: str,
    settings: Mapping[str, Any],
    *,
    prompt_tokens: int,
    answer_tokens: int,
    rounds: int,
    root: Path | None = None,
    threads: int | None = None,
    speculation: SpeculationOptions | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> dict[str, Any]:
    """Measure ``rounds`` rounds after one that is not counted; with ``speculation``, what that brings as well.

    Returns:
        Numbers by name; where a number was measured once a round, its median, least and largest.

    Raises:
        ModelError: the model cannot be loaded.
        RequestError: the settings cannot be honoured, or prompt and answer do not fit into the context.
    """
    folder = ModelFolder.open(model, root)
    started = time.perf_counter()
    local = LocalModel.open(folder, threads=threads)
    load_s = time.perf_counter() - started
    if prompt_tokens + answer_tokens > local.session.cache_shape.limit:
        raise RequestError(
            f"{prompt_tokens} + {answer_tokens} tokens are more than the context of {local.session.cache_shape.limit}; "
            "lower --prompt-tokens or --answer-tokens"
        )
    text = local.tokenizer.encode_prompt(check_text())
    prompt = (text * (prompt_tokens // len(text) + 1))[:prompt_tokens]
    measured = []
    for number in range(rounds + 1):
        request = GenerationRequest(
            **{"seed": number, **settings, "max_tokens": answer_tokens, "min_tokens": answer_tokens}
        )
        measured.append(_round(local, prompt, request))
        progress("rounds", number + 1, rounds + 1)
    return {
        "model": folder.name,
        "dtype": folder.manifest.dtype,
        "threads": local.session.threads,
        "sampler": request.sampler,
        "prompt_tokens": prompt_tokens,
        "answer_tokens": answer_tokens,
        "rounds": rounds,
        "load_seconds": round(load_s, 4),
        **{name: _summary([values[name] for values in measured[1:]]) for name in measured[0]},
        **_speculation(local, text, settings, speculation, prompt_tokens, answer_tokens, rounds, progress),
        "peak_memory_bytes": peak_memory_bytes(),
    }


def _speculation(
    local: LocalModel,
    text: list[int],
    settings: Mapping[str, Any],
    options: SpeculationOptions | None,
    prompt_tokens: int,
    answer_tokens: int,
    rounds: int,
    progress: Callable[[str, int, int], None],
) -> dict[str, Any]:
    """Return what speculation brings on three stretches of the text, or nothing where it was not asked for."""
    if options is None:
        return {}
    from edgeduet_client.llm.speculation.bench import bench_speculation
    from edgeduet_client.llm.speculation.speculator import Speculator

    long = text * (2 * prompt_tokens // len(text) + 2)
    prompts = [long[start : start + prompt_tokens] for start in (0, len(text) // 3, 2 * len(text) // 3)]
    result = bench_speculation(
        local,
        Speculator.open(local, options),
        prompts,
        settings,
        answer_tokens=answer_tokens,
        rounds=rounds,
        progress=lambda done, total: progress("speculation", done, total),
    )
    return {"speculation": result}


def bench_rows(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the result as rows (what, median, range)."""
    return [
        ("loading, s", f"{result['load_seconds']:.2f}", "once"),
        ("reading, tokens/s", *_spread(result["prefill_tokens_per_second"], "{:.0f}")),
        ("time to first token, ms", *_spread(result["first_token_seconds"], "{:.1f}", 1000)),
        ("writing, tokens/s", *_spread(result["decode_tokens_per_second"], "{:.1f}")),
        ("a token, ms", *_spread(result["seconds_per_token"], "{:.2f}", 1000)),
        ("peak memory", human_bytes(result["peak_memory_bytes"]), "the whole process"),
    ]


def peak_memory_bytes() -> int:
    """Return the most memory this process has had resident."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _round(local: LocalModel, prompt: list[int], request: GenerationRequest) -> dict[str, float]:
    first = 0.0
    started = time.perf_counter()
    for event in local.generate(prompt, request, clock=time.perf_counter):
        first = first or time.perf_counter() - started
        if isinstance(event, Finished):
            # The first token comes with reading; every other one costs a step.
            per_token = event.seconds_decode / (event.completion_tokens - 1)
            return {
                "prefill_tokens_per_second": event.prompt_tokens / event.seconds_prefill,
                "first_token_seconds": first,
                "decode_tokens_per_second": 1 / per_token,
                "seconds_per_token": per_token,
            }
    raise AssertionError("a generation ends with Finished")


def _summary(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 6),
        "least": round(min(values), 6),
        "largest": round(max(values), 6),
    }


def _spread(values: Mapping[str, float], form: str, factor: float = 1) -> tuple[str, str]:
    median, least, largest = (form.format(values[name] * factor) for name in ("median", "least", "largest"))
    return median, f"{least} to {largest}"
