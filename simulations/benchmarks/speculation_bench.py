"""What speculative decoding brings: every fixed arm, every selector and the peers, over five kinds of text.

    python simulations/benchmarks/speculation_bench.py --models FOLDER --model smollm2-135m-int8
    python simulations/benchmarks/speculation_bench.py ... --genai-int8 DIR --gguf FILE --llama-python PY --hf DIR
    python simulations/benchmarks/speculation_bench.py --parts mix     # measure one part again
    python simulations/benchmarks/speculation_bench.py --parts         # only write the tables again

Drafters are those in the model's folder (`edgeduet-client llm drafter train`) and lookup. Greedy, answers of 96 tokens,
no end before; prompts of speculation_prompts.py, in the chat template. Wall time; whoever is compared writes the
same prompt's answer one after the other, and ratios are taken within a prompt.

arms    per domain: plain decoding, no draft, every fixed arm and every selector, in one process. Selectors have seen
        nothing before the first prompt of their domain, which is not counted.
mix     a stream that changes domain every three prompts: selectors keep what they learnt; oracle: the fixed arm that is
        best over the whole stream in hindsight.
fly     lossy verification beside exact, on the same prompts: lookup drafts of 15 tokens, both entropy modes; how much
        text they change, and what the model thinks of it.
peers   processes of their own: ours plain and with the default selector, and the peers, plain and with their own
        speculation. Rows differ in weights' precision: perplexities are in llm_speed_bench.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from llm_peer_processes import Entrant, PeerProcess, add_options, in_turn
from speculation_prompts import DOMAINS
from speculation_tables import tables

from edgeduet_client.llm.generate import Finished, TextPiece
from edgeduet_client.llm.local_model import LocalModel
from edgeduet_client.llm.request import GenerationRequest
from edgeduet_client.llm.speculation.arms import NO_DRAFT, Arm
from edgeduet_client.llm.speculation.bench import Contender, answer_of, contenders_of, row_of, step_costs
from edgeduet_client.llm.speculation.options import DrafterOptions, FlyOptions, SpeculationOptions
from edgeduet_client.llm.speculation.selectors import SELECTORS
from edgeduet_client.llm.speculation.speculator import Speculator

PARTS = ("arms", "mix", "fly", "peers")
TOKENS = 96
LENGTHS = (1, 2, 4, 8)
FLY_LENGTH = 15
"""Long drafts, where fly can help: it needs a window of agreeing tokens behind a mismatch."""
STREAM_RUN = 3
"""Prompts of one domain in a row in the stream that changes domain."""


def prompt_ids(model: LocalModel, text: str) -> list[int]:
    """Return a user message in the model's chat template, encoded."""
    return list(model.tokenizer.encode_chat([{"role": "user", "content": text}]))


def contenders(plain: LocalModel, speculator: Speculator) -> list[Contender]:
    """Return plain decoding, no draft, every fixed arm, and every selector with nothing learnt."""
    fixed = contenders_of(plain, speculator)[:-1]
    learning = [
        Contender(f"selector {name}", replace(plain, speculator=speculator.with_selector(name)))
        for name in SELECTORS
        if name != "fixed"
    ]
    return [*fixed, *learning]


def measure(
    field: Sequence[Contender], prompts: Sequence[Sequence[int]], *, uncounted: int, label: str
) -> list[Contender]:
    """Let every contender answer every prompt, starting with another one each time."""
    request = GenerationRequest(sampler="greedy", min_tokens=TOKENS, max_tokens=TOKENS, gate="off")
    for number, prompt in enumerate(prompts):
        for contender in in_turn(field, number):
            finished = answer_of(contender.model, prompt, request)
            if number >= uncounted:
                contender.seconds_per_token.append(finished.seconds_decode / (finished.completion_tokens - 1))
                contender.finished.append(finished)
        print(f"{label}: prompt {number + 1} of {len(prompts)}", file=sys.stderr, flush=True)
    return list(field)


def rows_of(field: Sequence[Contender]) -> list[dict[str, Any]]:
    """Return one row per contender, with its ratio to plain decoding and the seconds of each prompt."""
    return [row_of(contender, field[0]) | {"seconds": contender.seconds_per_token} for contender in field]


def measure_arms(plain: LocalModel, speculator: Speculator, prompts: Mapping[str, list[list[int]]]) -> dict[str, Any]:
    """Return the rows of every domain."""
    found: dict[str, Any] = {}
    for domain, of_domain in prompts.items():
        field = measure(contenders(plain, speculator), of_domain, uncounted=1, label=domain)
        found[domain] = rows_of(field)
    return {"domains": found, "step_costs": step_costs(plain, prompts["prose"][0]), "machine": machine_facts()}


def measure_mix(plain: LocalModel, speculator: Speculator, prompts: Mapping[str, list[list[int]]]) -> dict[str, Any]:
    """Return the rows over a stream that changes domain every :data:`STREAM_RUN` prompts."""
    runs = [
        of_domain[start : start + STREAM_RUN]
        for start in range(0, min(map(len, prompts.values())), STREAM_RUN)
        for of_domain in prompts.values()
    ]
    stream = [prompt for run in runs for prompt in run]
    field = measure(contenders(plain, speculator), stream, uncounted=1, label="mix")
    return {"rows": rows_of(field), "machine": machine_facts()}


def measure_fly(plain: LocalModel, prompts: Mapping[str, list[list[int]]]) -> dict[str, Any]:
    """Return, by domain and way to verify, one entry per prompt (see :func:`fly_answer`)."""
    ways = {"no draft": lookup_speculator(plain, None).fixed(NO_DRAFT)}
    for name, entropy in (("exact", None), ("fly, topk", "topk"), ("fly, full-normalised", "full-normalised")):
        ways[name] = lookup_speculator(plain, entropy).fixed(Arm("ngram", FLY_LENGTH))
    request = GenerationRequest(sampler="greedy", min_tokens=TOKENS, max_tokens=TOKENS, gate="off")
    found: dict[str, dict[str, list[dict[str, Any]]]] = {domain: {name: [] for name in ways} for domain in prompts}
    for domain, of_domain in prompts.items():
        for number, prompt in enumerate(of_domain):
            for name in in_turn(list(ways), number):
                found[domain][name].append(fly_answer(plain, ways[name], prompt, request))
        print(f"fly: {domain}", file=sys.stderr, flush=True)
    return {"domains": found, "length": FLY_LENGTH, "machine": machine_facts()}


def lookup_speculator(plain: LocalModel, entropy: str | None) -> Speculator:
    """Return exact mode with lookup alone; verified by fly where ``entropy`` says how it measures uncertainty."""
    loose = {} if entropy is None else {"verify": "fly", "fly": FlyOptions.model_validate({"entropy": entropy})}
    lookup = DrafterOptions(name="ngram", kind="ngram")
    return Speculator.open(plain, SpeculationOptions(mode="exact", lengths=(FLY_LENGTH,), drafters=(lookup,), **loose))


def fly_answer(
    plain: LocalModel, speculator: Speculator, prompt: Sequence[int], request: GenerationRequest
) -> dict[str, Any]:
    """Return one answer, what it took, and its mean negative log-likelihood under the model itself."""
    ids: list[int] = []
    for event in replace(plain, speculator=speculator).generate(prompt, request):
        if isinstance(event, TextPiece):
            ids += event.ids
        if isinstance(event, Finished):
            finished = event
    stats = finished.speculation
    assert stats is not None
    rows = range(len(prompt) - 1, len(prompt) + len(ids) - 1)
    logits = plain.session.prefill([*prompt, *ids], plain.new_cache(), rows=rows).logits.astype(np.float64)
    peak = logits.max(axis=1)
    totals = peak + np.log(np.exp(logits - peak[:, None]).sum(axis=1))
    return {
        "seconds": finished.seconds_decode / (finished.completion_tokens - 1),
        "ids": ids,
        "tokens_a_step": stats.mean_accepted_tokens,
        "relaxed": stats.relaxed,
        "nll": float((totals - logits[np.arange(len(ids)), ids]).mean()),
    }


def measure_peers(
    found: Sequence[Entrant], prompts: Mapping[str, list[list[int]]], threads: int, models: Path | None
) -> dict[str, Any]:
    """Return seconds per token, by runtime and domain: one entry per prompt."""
    processes = [PeerProcess(entrant, threads, models) for entrant in found]
    seconds: dict[str, dict[str, list[float]]] = {entrant.name: {domain: [] for domain in prompts} for entrant in found}
    try:
        for process in processes:  # what is done once at the first request is not counted
            process.ask("generate", prompt=prompts["prose"][0], tokens=TOKENS)
        for domain, of_domain in prompts.items():
            for number, prompt in enumerate(of_domain):
                for process in in_turn(processes, number):
                    answer = process.ask("generate", prompt=prompt, tokens=TOKENS)
                    seconds[process.entrant.name][domain].append(answer["decode"]["wall"] / (TOKENS - 1))
            print(f"peers: {domain}", file=sys.stderr, flush=True)
        memory = {process.entrant.name: process.ask("memory")["pss"] for process in processes}
    finally:
        for process in processes:
            process.close()
    return {"seconds": seconds, "memory": memory, "machine": machine_facts()}


def peers_of(options: argparse.Namespace) -> list[Entrant]:
    """Return ours and the peers that were named, each plain and with its own speculation."""
    python = str(options.llama_python or sys.executable)
    found = [
        Entrant("edgeduet int8", "edgeduet greedy", options.model),
        Entrant("edgeduet int8, speculating", "edgeduet greedy fast", options.model),
    ]
    for label, folder in (("32", options.genai_int8), ("128", options.genai_int8_128)):
        if folder is not None:
            found.append(Entrant(f"genai int8, blocks of {label}", "genai", str(folder)))
            found.append(Entrant(f"genai int8, blocks of {label}, lookup", "genai ngram", str(folder)))
    if options.gguf is not None:
        found.append(Entrant("llama.cpp Q8_0", "llama.cpp", str(options.gguf), python))
        found.append(Entrant("llama.cpp Q8_0, lookup", "llama.cpp lookup", str(options.gguf), python))
    if options.hf is not None:
        found.append(Entrant("transformers float32", "transformers", str(options.hf)))
        found.append(Entrant("transformers float32, lookup", "transformers lookup", str(options.hf)))
    return found


def machine_facts() -> dict[str, Any]:
    """Return the load of the machine, and how many cores it has."""
    return {"load": [round(value, 1) for value in os.getloadavg()], "cores": os.cpu_count()}


def main() -> None:
    """Measure the parts asked for, and write all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.set_defaults(model="smollm2-135m-int8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=6, help="of each domain")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--mode", choices=("fast", "exact"), default="fast")
    parser.add_argument("--out", type=Path, default=Path("speculation_bench.json"))
    options = parser.parse_args()
    result: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    if options.parts:
        plain = LocalModel.open(options.model, options.models, threads=options.threads)
        prompts = {
            domain: [prompt_ids(plain, text) for text in texts[: options.prompts]] for domain, texts in DOMAINS.items()
        }
        result["about"] = {"model": options.model, "threads": options.threads, "mode": options.mode, "tokens": TOKENS}
        if "peers" in options.parts:
            result["peers"] = measure_peers(peers_of(options), prompts, options.threads, options.models)
            options.out.write_text(json.dumps(result))
        if "fly" in options.parts:
            result["fly"] = measure_fly(plain, prompts)
            options.out.write_text(json.dumps(result))
        for part, measure_part in (("arms", measure_arms), ("mix", measure_mix)):
            if part in options.parts:
                chosen = SpeculationOptions(mode=options.mode, lengths=LENGTHS)
                result[part] = measure_part(plain, Speculator.open(plain, chosen), prompts)
                options.out.write_text(json.dumps(result))
    options.out.with_suffix(".md").write_text(tables(result))
    print(tables(result))


if __name__ == "__main__":
    main()
