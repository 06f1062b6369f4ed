"""In steps of which sizes this machine computes a row alike, to the last bit.

Kernels for quantised weights often take another path for one row than for several, so plain decoding (one row a
step) and verification (several) can differ without any fault in either. Some work through rows in tiles, and treat
what is left over as single rows: an int8 model on a VNNI processor computed alike in steps of 2, 4, 6, 8 rows, and
otherwise in steps of 3, 5, 7, 9 (their last row). So exact mode fills every step up to a multiple of the *granule*:
the smallest of 1, 2, 4, 8 for which all such steps agree. It is found by running the same tokens in steps of every
size, at a short and a longer context, and comparing logits, hidden states and caches bit for bit. The answer holds for
the weights, the processor, the number of threads and the release of ONNX Runtime, and is kept on disk.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import platformdirs

from edgeduet_client.llm.kv_cache import KVCache
from edgeduet_client.llm.session import TargetSession
from edgeduet_shared.atomic_files import atomic_write_text

CONTEXTS = (24, 150)
"""Lengths at which it is asked: some kernels change their order of summation past 64 positions."""


GRANULES = (1, 2, 4, 8)
"""Sizes of tiles that are tried."""


@dataclass(frozen=True)
class Invariance:
    """What was found.

    Attributes:
        holds: whether all rows agree in steps of multiples of ``granule``.
        granule: rows a step is filled up to a multiple of; 2 where nothing helps.
        largest: rows of the largest step tried.
        rows: compared, for that granule.
        differing: of them, those that were not equal.
        flipped: of those, the ones whose best token differs.
    """

    holds: bool
    granule: int
    largest: int
    rows: int
    differing: int
    flipped: int

    def sentence(self) -> str:
        """Say it in words."""
        steps = f"steps of {self.granule} to {self.largest} rows" + (
            f" that are multiples of {self.granule}" if self.granule > 1 else ""
        )
        if self.holds:
            return f"rows are computed alike in {steps} ({self.rows} compared)"
        return (
            f"rows are NOT computed alike in {steps} on this machine: {self.differing} of {self.rows} differ, "
            f"{self.flipped} in their best token; exact mode cannot promise plain decoding's text here"
        )


def filled(rows: int, granule: int) -> int:
    """Return the size of a step of ``rows`` rows, filled up."""
    return -(-rows // granule) * granule


def measure_invariance(session: TargetSession, vocabulary: int, largest: int) -> Invariance:
    """Find the smallest granule for which steps agree.

    Args:
        session: of the model.
        vocabulary: tokens that exist.
        largest: rows of the largest step that decoding would take without filling up.
    """
    results = {}
    for granule in GRANULES:
        found = results[granule] = _with_granule(session, vocabulary, granule, filled(max(largest, 2), granule))
        if found.holds:
            return found
    return results[2]


def _with_granule(session: TargetSession, vocabulary: int, granule: int, largest: int) -> Invariance:
    """Compare steps of every multiple of ``granule`` with steps of ``granule`` rows that keep one."""
    rows = differing = flipped = 0
    for context in CONTEXTS:
        count = 2 * largest
        if context + count + granule > session.cache_shape.limit:
            continue
        tokens = np.random.default_rng(context).integers(0, vocabulary, context + count).tolist()
        prefix, block = tokens[:context], tokens[context:]
        reference, reference_cache = _in_steps(session, prefix, block, size=granule, kept=1)
        for size in range(granule, largest + 1, granule):
            if size == granule == 1:
                continue
            found, cache = _in_steps(session, prefix, block, size=size, kept=size)
            unequal = (found != reference).any(axis=1) | _cache_differs(cache, reference_cache, context)
            rows += len(unequal)
            differing += int(unequal.sum())
            logits, expected = found[:, : session.vocab_width], reference[:, : session.vocab_width]
            flipped += int((logits.argmax(axis=1) != expected.argmax(axis=1)).sum())
            if granule != 2 and differing:
                break  # only the fallback's numbers are reported
    return Invariance(differing == 0, granule, largest, rows, differing, flipped)


def cached_invariance(
    session: TargetSession, vocabulary: int, largest: int, *, weights_sha256: str, folder: Path | None = None
) -> Invariance:
    """As :func:`measure_invariance`, asked once for model, machine, threads and ONNX Runtime.

    Args:
        weights_sha256: of the model.
        folder: where answers are kept; default: the user's cache folder.
    """
    import onnxruntime

    asked = {
        "weights": weights_sha256,
        "machine": processor_name(),
        "onnxruntime": onnxruntime.__version__,
        "threads": session.threads,
        "largest": largest,
        "contexts": list(CONTEXTS),
    }
    key = sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:24]
    path = (folder or Path(platformdirs.user_cache_dir("edgeduet"))) / "invariance" / f"{key}.json"
    try:
        kept = json.loads(path.read_text("utf-8"))
        if kept["asked"] == asked:
            return Invariance(**kept["found"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # never asked, or the file is not ours: ask
    found = measure_invariance(session, vocabulary, largest)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, json.dumps({"asked": asked, "found": asdict(found)}, indent=1))
    return found


def _in_steps(
    session: TargetSession, prefix: Sequence[int], block: Sequence[int], *, size: int, kept: int
) -> tuple[np.ndarray, KVCache]:
    """Read ``prefix``, then ``block`` in steps of ``size`` rows of which ``kept`` are kept.

    The last step is filled up with a token that is dropped again.

    Returns:
        (len(block), V + H) logits and hidden states side by side, and the cache.
    """
    cache = session.new_cache()
    session.prefill(prefix, cache, rows=())
    found = []
    for place in range(0, len(block), kept):
        taken = list(block[place : place + kept])
        step = taken + [taken[-1]] * (size - len(taken))
        outcome = session.forward(step, cache, rows=tuple(range(size)), hidden=True)
        assert outcome.hidden is not None
        found.append(np.concatenate([outcome.logits, outcome.hidden], axis=1)[: len(taken)])
        cache.crop(len(prefix) + place + len(taken))
    return np.concatenate(found), cache


def _cache_differs(cache: KVCache, reference: KVCache, start: int) -> np.ndarray:
    """Return, per position from ``start`` on, whether any key or value differs."""
    differs = np.zeros(reference.length - start, np.bool_)
    for ours, theirs in zip(cache.buffers, reference.buffers, strict=True):
        span = slice(start, reference.length)
        differs |= (ours[:, :, span] != theirs[:, :, span]).any(axis=(0, 1, 3))
    return differs


def processor_name() -> str:
    """Name the processor: kernels are chosen by what it can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor()
    return f"{platform.system()} {platform.machine()} {model} x{os.cpu_count()}"
