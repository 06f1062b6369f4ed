"""A trace: what every round did, and what every drafter would have done at every start, one JSON line each.

Lines, by ``kind``:

* ``header``: drafters with their lengths, depth, costs as they stood;
* ``request``: a text begins; ``prompt`` tokens long;
* ``round``: ``position`` (tokens before it), arm, proposed, evaluated, accepted, emitted, seconds by part;
* ``start``: ``start`` (tokens before it), ``p`` of the token that followed, and by drafter ``proposed`` (tokens it
  would have), ``chances`` (of each being accepted, given the text, :func:`.estimators.chances`) and ``survival``.

Rounds are written as they happen; starts a little later, when the horizon behind them is committed. Unlike scoring
for the selector, every start is written whatever that costs: the trace is complete, so that any selector can be
replayed (:mod:`.replay`). Writing it slows decoding down, outside the times it records.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.speculation.arms import NO_DRAFT, Arm, Round
from edgeduet_client.llm.speculation.costs import CostModel
from edgeduet_client.llm.speculation.delay_queue import DelayQueue
from edgeduet_client.llm.speculation.drafter import Drafter
from edgeduet_client.llm.speculation.estimators import Form, chances, proposed_tokens, survival
from edgeduet_client.llm.speculation.text import CommittedText
from edgeduet_shared.atomic_files import write_failure

FORMAT = 1
_BATCH = 16
_DIGITS = 6


class TraceWriter:
    """Writes a trace; one request after the other.

    Args:
        path: replaced where it exists.
        drafters: by name.
        lengths: by drafter, those it may be asked for.
        depth: tokens of the horizon.
        costs: as they stand.
        form: of the survival estimates.

    Raises:
        EdgeDuetError: the file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        drafters: Mapping[str, Drafter],
        lengths: Mapping[str, Sequence[int]],
        *,
        depth: int,
        costs: CostModel,
        form: Form = "rao-blackwell",
    ) -> None:
        self._path = path
        self._drafters = drafters
        self._depth = depth
        self._form = form
        self._text: CommittedText | None = None
        self._waiting: list[int] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = path.open("w", encoding="utf-8")
        except OSError as error:
            raise write_failure(path, error) from error
        self._write(
            kind="header",
            format=FORMAT,
            drafters={name: list(lengths[name]) for name in drafters},
            depth=depth,
            costs=costs.as_json(),
        )

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def round(self, text: CommittedText, round: Round, *, coupled: bool = False, left_out: Sequence[str] = ()) -> None:
        """Write a round that is committed.

        Args:
            text: of the request, the round's tokens included; a text not seen before begins a request.
            round: what it did.
            coupled: drawn drafts are verified as if they were certain.
            left_out: drafters that broke down; a start without them cannot be replayed.
        """
        before = len(text) - round.emitted
        if text is not self._text:
            self.end_request()
            self._text, self._coupled = text, coupled
            self._queue, self._pushed = DelayQueue(self._depth), before
            self._write(kind="request", prompt=text.prompt_length)
        self._write(
            kind="round",
            position=before,
            arm=[round.arm.drafter, round.arm.length],
            proposed=round.proposed,
            evaluated=round.evaluated,
            accepted=round.accepted,
            emitted=round.emitted,
            seconds={part: round_off(value) for part, value in round.seconds.items()},
        )
        for start in range(self._pushed, len(text)):
            self._queue.push(start)
        self._pushed = len(text)
        self._waiting += self._queue.release(len(text))
        if len(self._waiting) >= _BATCH:
            self._starts(text, left_out)

    def end_request(self, left_out: Sequence[str] = ()) -> None:
        """Write the starts that still wait and whose horizon is complete; idempotent."""
        if self._text is not None:
            self._starts(self._text, left_out)
            self._text = None

    def close(self) -> None:
        """End the request and the file."""
        if not self._file.closed:
            self.end_request()
            self._file.close()

    def _starts(self, text: CommittedText, left_out: Sequence[str]) -> None:
        starts = [start for start in self._waiting if start > text.first_kept]
        self._waiting = []
        if not starts:
            return
        lines: list[dict[str, Any]] = [
            {"start": start, "p": round_off(text.target(start).probability(text.tokens[start])), "drafters": {}}
            for start in starts
        ]
        for name, drafter in self._drafters.items():
            if name in left_out:
                continue
            redrafts = drafter.redraft(text, starts, min(self._depth, drafter.longest))
            for line, redraft in zip(lines, redrafts, strict=True):
                curve = survival(redraft, text, self._depth, self._form, coupled=self._coupled)
                line["drafters"][name] = {
                    "proposed": proposed_tokens(redraft, self._depth),
                    "chances": _rounded(chances(redraft, text, self._depth, coupled=self._coupled)),
                    "survival": _rounded(curve),
                }
        for line in lines:
            self._write(kind="start", **line)

    def _write(self, **values: Any) -> None:
        try:
            self._file.write(json.dumps(values, allow_nan=False, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            raise write_failure(self._path, error) from error


@dataclass
class TracedRequest:
    """One request of a trace.

    Axes: P starts in a row, K depth.

    Attributes:
        prompt_length: tokens.
        first: how many tokens were there at the first start.
        target: (P,) target probability of the token that followed each start.
        chances, survival: by drafter, (P, K).
        proposed: by drafter, (P,).
        rounds: tokens before it, and the round.
    """

    prompt_length: int
    first: int
    target: NDArray[np.float64]
    chances: Mapping[str, NDArray[np.float64]]
    survival: Mapping[str, NDArray[np.float64]]
    proposed: Mapping[str, NDArray[np.int64]]
    rounds: Sequence[tuple[int, Round]] = ()

    @property
    def starts(self) -> int:
        """P."""
        return len(self.target)


@dataclass
class Trace:
    """A trace that was read, or made up.

    Attributes:
        lengths: by drafter, those it may be asked for.
        depth: K.
        costs: when recording began.
        requests: in order.
    """

    lengths: Mapping[str, Sequence[int]]
    depth: int
    costs: CostModel
    requests: Sequence[TracedRequest] = field(default_factory=list)

    @property
    def arms(self) -> list[Arm]:
        """No draft, and every drafter at each of its lengths."""
        return [NO_DRAFT, *(Arm(name, length) for name, lengths in self.lengths.items() for length in lengths)]


def read_trace(path: Path) -> Trace:
    """Read a trace; a last line that was cut off in the middle of writing is left out.

    Raises:
        ModelError: it is no trace; names file and line.
    """
    reader = _Reader()
    for number, line in enumerate(_lines(path), 1):
        try:
            reader.take(json.loads(line))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise ModelError(f"{path}, line {number}: not a trace ({error})") from None
    if reader.trace is None:
        raise ModelError(f"{path} is empty, not a trace")
    reader.trace.requests = [one.request(reader.trace) for one in reader.found if one.rounds]
    return reader.trace


class _Reader:
    """Takes lines in order."""

    def __init__(self) -> None:
        self.trace: Trace | None = None
        self.found: list[_Found] = []

    def take(self, line: Mapping[str, Any]) -> None:
        kind = line["kind"]
        if self.trace is None:
            if kind != "header" or line["format"] != FORMAT:
                raise ValueError("it does not begin with the header of a trace of this version")
            self.trace = Trace(line["drafters"], int(line["depth"]), CostModel.from_json(line["costs"]))
        elif kind == "request":
            self.found.append(_Found(int(line["prompt"])))
        elif kind == "round":
            self.found[-1].rounds.append((int(line["position"]), _round_from(line)))
        elif kind == "start":
            self.found[-1].starts.append(_checked(line, self.trace.depth))
        else:
            raise ValueError(f"no such kind of line: {kind}")


def _checked(line: Mapping[str, Any], depth: int) -> Mapping[str, Any]:
    """Return a line about a start; everything that is read later is there."""
    int(line["start"]), float(line["p"])
    for values in line["drafters"].values():
        int(values["proposed"])
        if len(values["chances"]) != depth or len(values["survival"]) != depth:
            raise ValueError(f"curves are not {depth} long")
    return line


@dataclass
class _Found:
    prompt_length: int
    rounds: list[tuple[int, Round]] = field(default_factory=list)
    starts: list[Mapping[str, Any]] = field(default_factory=list)

    def request(self, trace: Trace) -> TracedRequest:
        """Return the request; of its starts those in a row that say something about every drafter."""
        first = self.rounds[0][0]
        whole: list[Mapping[str, Any]] = []
        for line in sorted(self.starts, key=lambda one: int(one["start"])):
            if line["start"] != first + len(whole) or set(line["drafters"]) != set(trace.lengths):
                break
            whole.append(line)

        def gather(name: str, what: str) -> NDArray[Any]:
            return np.array([line["drafters"][name][what] for line in whole])

        shape = (len(whole), trace.depth)
        return TracedRequest(
            self.prompt_length,
            first,
            np.array([line["p"] for line in whole], np.float64),
            {name: gather(name, "chances").astype(np.float64).reshape(shape) for name in trace.lengths},
            {name: gather(name, "survival").astype(np.float64).reshape(shape) for name in trace.lengths},
            {name: gather(name, "proposed").astype(np.int64) for name in trace.lengths},
            self.rounds,
        )


def _lines(path: Path) -> list[str]:
    """Return the lines that were written to their end."""
    try:
        return path.read_text("utf-8").split("\n")[:-1]
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read the trace {path}: {error}") from None


def _round_from(line: Mapping[str, Any]) -> Round:
    drafter, length = line["arm"]
    return Round(
        arm=Arm(drafter, int(length)),
        proposed=int(line["proposed"]),
        evaluated=int(line["evaluated"]),
        accepted=int(line["accepted"]),
        emitted=int(line["emitted"]),
        seconds={part: float(value) for part, value in line["seconds"].items()},
    )


def round_off(value: float) -> float:
    """Return ``value`` with as many significant digits as a trace keeps."""
    return float(f"{value:.{_DIGITS}g}")


def _rounded(values: NDArray[np.float64]) -> list[float]:
    return [round_off(float(value)) for value in values]
