"""What it costs to turn a row of logits into a token: our pipeline against transformers' processors.

    python simulations/benchmarks/sampling_bench.py                          # generated rows, 2 minutes
    python simulations/benchmarks/sampling_bench.py --quick
    python simulations/benchmarks/sampling_bench.py --models smollm2-135m gemma3-270m    # a model's own rows

Ours is everything the decoding loop does: ``sampling_distributions``, ``draw``, ``advance``. Theirs is what
``generate`` does with the same row: the float32 copy, ``LogitsProcessorList``, softmax, multinomial (argmax for
greedy). p-less exists in no release of theirs; its torch form is written here from the paper, on probabilities.
``top-p, sorted`` is ours with a full argsort instead of growing prefixes: what the other libraries do, in numpy.

One thread. Variants take turns on the same row, in an order that changes every round, and what is compared is CPU
time (a busy machine then only costs cache). Medians over all rows; ratios within this one run.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LogitsProcessorList
from transformers.generation import logits_process as theirs

from edgeduet_client.llm import truncation
from edgeduet_client.llm.distribution import Distribution, sampling_distributions
from edgeduet_client.llm.draw import draw, generator
from edgeduet_client.llm.local_model import LocalModel
from edgeduet_client.llm.plan import SamplingPlan, Vocabulary, make_plan
from edgeduet_client.llm.request import GenerationRequest
from edgeduet_client.llm.sampler_state import SamplerState, advance, initial_state
from edgeduet_client.llm.token_bytes import TokenBytes

Step = Callable[[NDArray[np.float32]], int]

VOCABULARIES = (49_152, 262_144)
WARM_STEPS = 8
ANSWERED = 256
"""Tokens generated before the measured step: what the penalties look at."""

TEXT = (
    "The lighthouse keeper wrote down the weather every evening: wind, clouds, the height of the waves. On quiet days "
    "he read the old pages and found that no two of them were alike. Der Regen kam am Morgen, leise zuerst, dann so "
    "stark, dass niemand mehr aus dem Haus ging. def mean(values): return sum(values) / len(values)  # raises on an "
    "empty list. In 1969 three astronauts flew to the moon and two of them walked on it; the third kept the ship. "
)


@dataclass(frozen=True)
class Variant:
    """One way to sample.

    Attributes:
        name: the sampler.
        side: ``ours``, ``transformers`` or ``sorted``.
        step: from a row to a token.
    """

    name: str
    side: str
    step: Step


@dataclass(frozen=True)
class Cost:
    """What a variant cost on one vocabulary.

    Attributes:
        median, high: microseconds of CPU per token; the median and the 90th percentile.
    """

    vocabulary: int
    rows: str
    name: str
    side: str
    median: float
    high: float


SAMPLERS: dict[str, tuple[dict[str, Any], Callable[[], list[Any]] | None]] = {
    "greedy": ({"sampler": "greedy"}, list),
    "p-less": ({"sampler": "p-less"}, None),
    "p-less, T = 1.5": ({"sampler": "p-less", "temperature": 1.5}, None),
    "p-less-norm": ({"sampler": "p-less-norm"}, None),
    "top-k 50": ({"sampler": "top-k", "top_k": 50}, lambda: [theirs.TopKLogitsWarper(50)]),
    "top-p 0.9": ({"sampler": "top-p", "top_p": 0.9}, lambda: [theirs.TopPLogitsWarper(0.9)]),
    "T 0.7, k 20, p 0.8": (
        {"sampler": "top-p", "temperature": 0.7, "top_k": 20, "top_p": 0.8},
        lambda: [theirs.TemperatureLogitsWarper(0.7), theirs.TopKLogitsWarper(20), theirs.TopPLogitsWarper(0.8)],
    ),
    "min-p 0.05": ({"sampler": "min-p", "min_p": 0.05}, lambda: [theirs.MinPLogitsWarper(0.05)]),
    "typical 0.95": ({"sampler": "typical", "typical_p": 0.95}, lambda: [theirs.TypicalLogitsWarper(0.95)]),
    "epsilon 3e-4": ({"sampler": "epsilon", "epsilon": 3e-4}, lambda: [theirs.EpsilonLogitsWarper(3e-4)]),
    "eta 3e-4": ({"sampler": "eta", "eta": 3e-4}, lambda: [theirs.EtaLogitsWarper(3e-4)]),
    "temperature 0.8": (
        {"sampler": "temperature", "temperature": 0.8},
        lambda: [theirs.TemperatureLogitsWarper(0.8)],
    ),
    "mirostat": ({"sampler": "mirostat", "mirostat_tau": 4.0, "mirostat_eta": 0.1}, None),
    "top-n-sigma 1": ({"sampler": "top-n-sigma", "top_n_sigma": 1.0}, None),
    "top-k 50, repetition 1.1": (
        {"sampler": "top-k", "top_k": 50, "repetition_penalty": 1.1},
        lambda: [theirs.RepetitionPenaltyLogitsProcessor(1.1), theirs.TopKLogitsWarper(50)],
    ),
}


def generated_rows(vocabulary: int, count: int) -> NDArray[np.float32]:
    """Return rows shaped like those of a language model: a normal bulk, and a few leaders well above it."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((count, vocabulary)).astype(np.float32) * 2.5
    for row in rows:
        leaders = rng.integers(3, 60)
        places = rng.choice(vocabulary, leaders, replace=False)
        row[places] = 18 - rng.uniform(0.5, 2.5) * np.log1p(np.arange(leaders))
    return rows


def model_rows(name: str, root: Path | None, count: int) -> tuple[Vocabulary, NDArray[np.float32], float, float]:
    """Run a model over ``TEXT``.

    Returns its vocabulary, its rows, milliseconds of CPU per step of one token, and microseconds of CPU of p-less
    right after such a step, where caches are as they are while decoding.
    """
    model = LocalModel.open(name, root, threads=1)
    cache = model.new_cache()
    plan = make_plan(GenerationRequest(), model.vocabulary)
    sample = our_step(plan, initial_state(plan), ())
    rows, steps, samples = [], [], []
    for token in model.tokenizer.encode_prompt(TEXT)[: count + WARM_STEPS]:
        started = time.thread_time_ns()
        row = model.session.forward([token], cache).logits[0]
        stepped = time.thread_time_ns()
        sample(row)
        samples.append(time.thread_time_ns() - stepped)
        steps.append(stepped - started)
        rows.append(row.copy())
    measured = slice(WARM_STEPS, None)
    return (
        model.vocabulary,
        np.stack(rows[measured]),
        float(np.median(steps[measured])) / 1e6,
        float(np.median(samples[measured])) / 1e3,
    )


def our_step(plan: SamplingPlan, state: SamplerState, answer: Sequence[int]) -> Step:
    """Return the sampling part of a decoding step."""
    rng = generator(0)

    def step(row: NDArray[np.float32]) -> int:
        distributions, states = sampling_distributions(row[None], None, answer, (), plan, state)
        token = draw(distributions[0], rng)
        advance(states[0], plan, token, distributions[0])
        return token

    return step


def their_step(processors: Sequence[Any], answer: Sequence[int], *, greedy: bool) -> Step:
    """Return what ``transformers.generate`` does with a row."""
    chain = LogitsProcessorList(processors)
    input_ids = torch.tensor([answer])

    def step(row: NDArray[np.float32]) -> int:
        scores = chain(input_ids, torch.from_numpy(row)[None].to(copy=True, dtype=torch.float32))
        if greedy:
            return int(torch.argmax(scores, dim=-1))
        probabilities = torch.nn.functional.softmax(scores, dim=-1)
        return int(torch.multinomial(probabilities, num_samples=1).squeeze(1))

    return step


def torch_p_less(temperature: float) -> Step:
    """Return p-less as the paper describes it, on probabilities, in torch."""

    def step(row: NDArray[np.float32]) -> int:
        probabilities = torch.softmax(torch.from_numpy(row)[None] / temperature, dim=-1)
        threshold = probabilities.square().sum(dim=-1, keepdim=True)
        kept = torch.where(probabilities >= threshold, probabilities, 0.0)
        return int(torch.multinomial(kept / kept.sum(dim=-1, keepdim=True), num_samples=1).squeeze(1))

    return step


def sorted_top_p(p: float) -> Step:
    """Return top-p by sorting the whole row, in numpy."""
    rng = generator(0)

    def step(row: NDArray[np.float32]) -> int:
        e = np.exp(row - row.max())
        order = np.argsort(-e)
        cumulative = np.cumsum(e[order].astype(np.float64))
        inside = np.searchsorted(cumulative, p * cumulative[-1]) + 1
        place = np.searchsorted(cumulative[:inside], rng.random() * cumulative[inside - 1], side="right")
        return int(order[place])

    return step


def variants(vocabulary: Vocabulary) -> list[Variant]:
    """Return all ways to sample from a vocabulary."""
    answer = np.random.default_rng(1).integers(0, vocabulary.used, ANSWERED).tolist()
    found = []
    for name, (settings, processors) in SAMPLERS.items():
        plan = make_plan(GenerationRequest(**settings), vocabulary)
        found.append(Variant(name, "ours", our_step(plan, _state_after(answer, plan), answer)))
        if processors is not None:
            found.append(Variant(name, "transformers", their_step(processors(), answer, greedy=name == "greedy")))
    found.append(Variant("p-less", "transformers", torch_p_less(1.0)))
    found.append(Variant("p-less, T = 1.5", "transformers", torch_p_less(1.5)))
    found.append(Variant("top-p 0.9", "sorted", sorted_top_p(0.9)))
    return found


def _state_after(answer: Sequence[int], plan: SamplingPlan) -> SamplerState:
    """Return the state after ``answer``, whose tokens were drawn elsewhere."""
    state = initial_state(plan)
    for token in answer:
        state = advance(state, plan, token, Distribution(np.array([token]), np.ones(1), kept_mass=1.0))
    if state.surprise_bound is not None:
        bound = initial_state(plan).surprise_bound
        state = SamplerState(state.length, state.counts, state.history, bound, state.tail, state.grammar)
    return state


def measure(
    vocabulary: Vocabulary, rows: NDArray[np.float32], rounds: int, label: str, chosen: Sequence[Variant]
) -> list[Cost]:
    """Time all variants, taking turns on every row."""
    times: dict[int, list[int]] = {place: [] for place in range(len(chosen))}
    order = np.random.default_rng(2)
    for turn in range(-1, rounds):
        for row in rows:
            for place in order.permutation(len(chosen)):
                step = chosen[place].step
                started = time.thread_time_ns()
                step(row)
                if turn >= 0:  # the first round warms caches up
                    times[int(place)].append(time.thread_time_ns() - started)
    return [
        Cost(
            vocabulary=vocabulary.used,
            rows=label,
            name=variant.name,
            side=variant.side,
            median=float(np.median(times[place])) / 1e3,
            high=float(np.quantile(times[place], 0.9)) / 1e3,
        )
        for place, variant in enumerate(chosen)
    ]


def table(costs: Sequence[Cost], step_ms: float | None) -> str:
    """Return the costs of one vocabulary as text."""
    by = {(cost.name, cost.side): cost for cost in costs}
    lines = [
        f"{'sampler':<26} {'ours us':>9} {'(90 %)':>9} {'theirs us':>10} {'(90 %)':>9} {'theirs/ours':>12}  of a step"
    ]
    for name in SAMPLERS:
        ours, other = by[name, "ours"], by.get((name, "transformers"))
        compared = (
            f"{other.median:>10.0f} {other.high:>9.0f} {other.median / ours.median:>11.1f}x" if other else " " * 32
        )
        share = f"{ours.median / 1e3 / step_ms:>9.1%}" if step_ms else ""
        lines.append(f"{name:<26} {ours.median:>9.0f} {ours.high:>9.0f} {compared}  {share}".rstrip())
    return "\n".join(lines)


def ratios(costs: Sequence[Cost]) -> dict[str, float]:
    """Return how much longer a sorted top-p takes than p-less, in numpy and in transformers."""
    by = {(cost.name, cost.side): cost.median for cost in costs}
    p_less = by["p-less", "ours"]
    return {
        "top-p, sorted (numpy) / p-less": by["top-p 0.9", "sorted"] / p_less,
        "top-p (transformers) / p-less": by["top-p 0.9", "transformers"] / p_less,
        "top-p (ours) / p-less": by["top-p 0.9", "ours"] / p_less,
        "top-p, sorted (numpy) / top-p (ours)": by["top-p 0.9", "sorted"] / by["top-p 0.9", "ours"],
    }


def kept_tokens(rows: NDArray[np.float32]) -> str:
    """Say how many tokens p-less and top-p keep on average."""
    shifted = [truncation.shifted_logits(row, 1.0) for row in rows]
    p_less = np.mean([truncation.p_less(row).sum() for row in shifted])
    top_p = np.mean([truncation.top_p(row, 0.9).sum() for row in shifted])
    return f"kept on average: p-less {p_less:.1f}, top-p 0.9 {top_p:.1f}"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rows and rounds")
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="*", default=[], help="imported models whose own rows to use")
    parser.add_argument("--models-root", type=Path, help="folder of imported models")
    parser.add_argument("--out", type=Path, default=Path("sampling_bench.json"), help="results as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows_wanted, rounds = (8, 2) if options.quick else (options.rows, options.rounds)
    report = []
    for source in options.models or VOCABULARIES:
        step_ms = None
        if isinstance(source, str):
            vocabulary, rows, step_ms, inside_us = model_rows(source, options.models_root, rows_wanted)
            label = (
                f"{source}, {step_ms:.1f} ms a step, p-less right after one {inside_us:.0f} us "
                f"({inside_us / 1e3 / step_ms:.1%})"
            )
        else:
            tokens = TokenBytes((b"x",) * source, frozenset(), "")
            vocabulary = Vocabulary(source, source, (0,), tokens, lambda text: [])
            rows, label = generated_rows(source, rows_wanted), "generated"
        costs = measure(vocabulary, rows, rounds, label, variants(vocabulary))
        print(f"\n{vocabulary.used:,} tokens, rows: {label}; {kept_tokens(rows)}\n{table(costs, step_ms)}\n")
        for name, ratio in ratios(costs).items():
            print(f"{name:<40} {ratio:6.1f}x")
        report.append({"rows": label, "costs": [asdict(cost) for cost in costs], "ratios": ratios(costs)})
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\nwritten to {options.out}")


if __name__ == "__main__":
    main()
