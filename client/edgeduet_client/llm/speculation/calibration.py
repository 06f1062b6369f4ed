"""Measures what steps of the target and drafts of each drafter take here, and remembers it.

The answer holds for the weights, the processor, the number of threads, the release of ONNX Runtime, the step sizes and
the drafters; it is kept as JSON in the user's cache folder, written whole or not at all. Sizes take turns, so that a
machine that slows down slows all of them, and what counts is the median.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np
import platformdirs

from edgeduet_client.llm.distribution import CERTAIN, Distribution
from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.session import TargetSession
from edgeduet_client.llm.speculation.costs import CostModel, DraftCost
from edgeduet_client.llm.speculation.drafter import Drafter
from edgeduet_client.llm.speculation.invariance import filled, processor_name
from edgeduet_client.llm.speculation.text import CommittedText
from edgeduet_shared.atomic_files import atomic_write_text

Calibrate = Literal["on", "cached", "off"]
CONTEXTS = (128, 768)
"""Lengths at which steps are measured, where the model's context allows."""
REPEATS = 7
_PERIOD = 24
"""The text repeats itself after so many tokens, so that lookups find something."""
_IDLE = 8
"""Tokens an idle drafter missed when it has to catch up."""


def calibrated_costs(
    session: TargetSession,
    drafters: Mapping[str, Drafter],
    *,
    vocabulary: int,
    longest: int,
    granule: int = 1,
    weights_sha256: str,
    calibrate: Calibrate = "cached",
    folder: Path | None = None,
    clock: Callable[[], float],
) -> CostModel:
    """Return what rounds cost.

    Args:
        session: of the target.
        drafters: by name; none of them in use.
        vocabulary: tokens that exist.
        longest: tokens of the longest draft.
        granule: rows steps are filled up to a multiple of.
        weights_sha256: of the target.
        calibrate: ``on``: measure; ``cached``: measure unless it is known; ``off``: a guess that rounds correct.
        folder: where answers are kept; default: the user's cache folder.
        clock: seconds.

    Raises:
        ModelError: the target or a drafter failed.
    """
    rows = filled(longest + 1, granule)
    if calibrate == "off":
        return CostModel.guessed(list(drafters), rows, granule=granule)
    asked = _question(session, drafters, rows, granule, weights_sha256)
    key = sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:24]
    path = (folder or Path(platformdirs.user_cache_dir("edgeduet"))) / "costs" / f"{key}.json"
    if calibrate == "cached" and (known := _known(path, asked)) is not None:
        return known
    costs = measure_costs(session, drafters, vocabulary=vocabulary, longest=longest, granule=granule, clock=clock)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, json.dumps({"asked": asked, "costs": costs.as_json()}, indent=1))
    return costs


def measure_costs(
    session: TargetSession,
    drafters: Mapping[str, Drafter],
    *,
    vocabulary: int,
    longest: int,
    granule: int = 1,
    clock: Callable[[], float],
) -> CostModel:
    """Measure; some seconds. Arguments as :func:`calibrated_costs`."""
    sizes = sorted({filled(rows, granule) for rows in range(1, longest + 2)})
    limit = session.cache_shape.limit
    contexts = [context for context in CONTEXTS if context + sizes[-1] + _PERIOD <= limit]
    if not contexts:
        contexts = [max(limit - sizes[-1] - _PERIOD, 1)]
    ids = _repeating(vocabulary, contexts[-1] + sizes[-1] + _PERIOD)
    steps = {context: _step_seconds(session, ids, context, sizes, granule, clock) for context in contexts}
    drafts, catch_up = {}, {}
    for name, drafter in drafters.items():
        drafts[name], catch_up[name] = _draft_cost(session, drafter, ids, contexts[0], longest, clock)
    return CostModel(steps, drafts, catch_up=catch_up, granule=granule)


def _step_seconds(
    session: TargetSession,
    ids: Sequence[int],
    context: int,
    sizes: Sequence[int],
    granule: int,
    clock: Callable[[], float],
) -> list[float]:
    """Return the seconds of steps of 1, 2, ... rows; sizes between those that are made cost what they are filled to."""
    cache = session.new_cache()
    session.prefill(ids[:context], cache, rows=())
    taken: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(REPEATS + 1):
        for size, times in taken.items():
            began = clock()
            session.forward(ids[context : context + size], cache, rows=tuple(range(size)), hidden=True)
            times.append(clock() - began)
            cache.crop(context)
    # The first of each prepares buffers.
    medians = {size: _seconds(times[1:]) for size, times in taken.items()}
    return [medians[filled(rows, granule)] for rows in range(1, sizes[-1] + 1)]


def _draft_cost(
    session: TargetSession,
    drafter: Drafter,
    ids: Sequence[int],
    context: int,
    longest: int,
    clock: Callable[[], float],
) -> tuple[DraftCost, float]:
    """Return what drafts take, and what catching up takes on top of the next one."""
    text, grow = _growing_text(session, ids, context)
    drafter.start(text)
    grow(1)
    rng = np.random.default_rng(0)
    most = min(longest, drafter.longest)
    taken: dict[int, list[float]] = {1: [], most: []}
    proposed: dict[int, list[int]] = {1: [], most: []}
    caught = []
    for turn in range(REPEATS + 1):
        began = clock()
        drafter.draft(text, 1, rng)
        caught.append(clock() - began)
        for length, times in taken.items():
            began = clock()
            proposed[length].append(len(drafter.draft(text, length, rng)))
            times.append(clock() - began)
        grow(_IDLE if turn % 2 else 1)
    short, long = _seconds(taken[1][1:]), _seconds(taken[most][1:])
    tokens = statistics.median(proposed[most]) - statistics.median(proposed[1])
    each = max((long - short) / tokens, 0.0) if tokens > 0 else 0.0
    # After odd turns the text grew by _IDLE tokens, so that even ones, but for the first, had to catch up.
    catching = max(_seconds(caught[2::2]) - _seconds(caught[1::2]), 0.0)
    return DraftCost(max(short - each * min(statistics.median(proposed[1]), 1), 0.0), each), catching


def _growing_text(
    session: TargetSession, ids: Sequence[int], context: int
) -> tuple[CommittedText, Callable[[int], None]]:
    """Return a text of ``context`` prompt tokens, and what commits the next ones with the target's hidden states."""
    cache = session.new_cache()
    text = CommittedText(ids[:context])
    session.prefill(ids[: context - 1], cache, rows=())

    def grow(count: int) -> None:
        room = cache.shape.limit - cache.length - 1
        for _ in range(min(count, room)):
            step = session.forward([text.tokens[-1]], cache, rows=(0,), hidden=True)
            token = ids[len(text) % _PERIOD]
            text.extend([token], [Distribution(np.array([token]), CERTAIN)], step.hidden)

    return text, grow


def _repeating(vocabulary: int, count: int) -> list[int]:
    period = np.random.default_rng(0).integers(0, vocabulary, _PERIOD)
    return np.resize(period, count).tolist()


def _seconds(times: Sequence[float]) -> float:
    # A clock that stands still must not make a step cost nothing.
    return max(statistics.median(times), 1e-9)


def _question(
    session: TargetSession, drafters: Mapping[str, Drafter], rows: int, granule: int, weights_sha256: str
) -> dict[str, Any]:
    import onnxruntime

    return {
        "weights": weights_sha256,
        "machine": processor_name(),
        "onnxruntime": onnxruntime.__version__,
        "threads": session.threads,
        "rows": rows,
        "granule": granule,
        "contexts": list(CONTEXTS),
        "drafters": {
            name: [drafter.kind, drafter.longest, drafter.memory_bytes()] for name, drafter in sorted(drafters.items())
        },
    }


def _known(path: Path, asked: Mapping[str, Any]) -> CostModel | None:
    """Return what was measured before, or ``None``: never asked, or the file is not ours."""
    try:
        kept = json.loads(path.read_text("utf-8"))
        return CostModel.from_json(kept["costs"]) if kept["asked"] == asked else None
    except (OSError, ValueError, KeyError, TypeError, ModelError):
        return None
