"""How fast the local language model is: ours against llama.cpp, onnxruntime-genai and transformers, same weights.

    python simulations/benchmarks/llm_speed_bench.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf \\
        --llama-python ~/llama/bin/python --genai-int8 genai-int8 --genai-int4 genai-int4 --hf smollm2-hf
    python simulations/benchmarks/llm_speed_bench.py --quick            # two rounds, ours alone where no peer is given
    python simulations/benchmarks/llm_speed_bench.py --parts cold import ...   # measure only these again
    python simulations/benchmarks/llm_speed_bench.py --parts            # only write the tables of what was measured

Ours: `edgeduet-client llm import FILE.gguf --name smollm2-135m`, and the same with `--quantize int8 --name
smollm2-135m-int8`. Peers: llama-cpp-python in any venv; a folder by `python -m onnxruntime_genai.models.builder -i
HF-FOLDER -o FOLDER -p int8 -e cpu -c cache --extra_options accuracy_level=4 block_size=32` (and `-p int4`, and
int8 with `block_size=128`). A peer that is not there is left out, and a line says so.

Parts (default: all):

speed        every runtime in a process of its own, all loaded, only one working: in every round each reads a prompt of
             64 and one of 512 tokens into an empty cache and writes 32 tokens, the first one moving every round
             (transformers in every fourth round only). Ours is LocalModel.generate with everything around it, theirs
             their own loop, greedy. 1 thread: processor time, which other programs on the machine change little;
             more threads: wall time, which they do change.
steps        ours: what part of a step everything after the logits takes.
perplexity   of all runtimes on one fixed text, so that a fast wrong one is seen.
cold         fresh processes, one at a time: from starting Python to the first token of a 64-token prompt; then
             memory after 512 + 32 more.
import       fresh processes: only the imports, ours and the torch stack's.

Ratios are other / ours within one round (above 1: ours is faster), median and quartiles over rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llm_peer_processes import Entrant, PeerProcess, add_options, entrants, in_turn, machine
from llm_speed_tables import tables

PARTS = ("speed", "steps", "perplexity", "cold", "import")
PROMPTS = (64, 512)
TOKENS = 32
SLOW = ("transformers",)
"""Kinds that take part in every fourth round only: their ratio is far from 1, and they take most of the time."""
IMPORTS = {
    "edgeduet_client.llm (LocalModel)": "from edgeduet_client.llm.local_model import LocalModel; import onnxruntime",
    "edgeduet_client.llm.serving": "import edgeduet_client.llm.serving.http_api; import onnxruntime",
    "torch": "import torch",
    "torch and transformers": "import torch; from transformers import AutoModelForCausalLM, LlamaForCausalLM",
    "onnxruntime alone": "import onnxruntime",
}
AFTER_IMPORT = """
import json, sys, time
# Not getrusage: its highest size includes that of the process that started this one.
size = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"cpu": time.process_time(), "peak": 1024 * int(size.split()[1]), "torch": "torch" in sys.modules}))
"""


@contextmanager
def running(found: Sequence[Entrant], threads: int, models: Path | None) -> Iterator[list[PeerProcess]]:
    """Give one loaded process per entrant."""
    processes: list[PeerProcess] = []
    try:
        processes += (PeerProcess(entrant, threads, models) for entrant in found)
        yield processes
    finally:
        for process in processes:
            process.close()


def measure_speed(
    found: Sequence[Entrant], text: Sequence[int], threads: int, rounds: int, models: Path | None
) -> dict[str, Any]:
    """Return seconds by runtime and prompt length: one entry per round."""
    clock = "cpu" if threads == 1 else "wall"
    times: dict[str, dict[str, dict[str, list[float | None]]]] = {
        entrant.name: {str(length): {"prefill": [], "decode": []} for length in PROMPTS} for entrant in found
    }
    with running(found, threads, models) as processes:
        for number in range(-1, rounds):
            for length in PROMPTS:
                prompt = part_of(text, length, number)
                for process in in_turn(processes, number):
                    entry = times[process.entrant.name][str(length)]
                    seconds = _seconds(process, prompt, clock) if _takes_part(process.entrant, number) else {}
                    if number >= 0:  # the round before warms up
                        for part, values in entry.items():
                            values.append(seconds.get(part))
            print(f"{threads} thread(s), round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        facts = machine({process.entrant.name: process.load for process in processes})
    return {"clock": clock, "rounds": rounds, "machine": facts, "seconds": times}


def _takes_part(entrant: Entrant, number: int) -> bool:
    return entrant.kind not in SLOW or number % 4 == 0


def _seconds(process: PeerProcess, prompt: Sequence[int], clock: str) -> dict[str, float]:
    """Return seconds per token of reading and of writing."""
    answer = process.ask("generate", prompt=prompt, tokens=TOKENS)
    return {"prefill": answer["prefill"][clock] / len(prompt), "decode": answer["decode"][clock] / (TOKENS - 1)}


def measure_steps(found: Sequence[Entrant], text: Sequence[int], models: Path | None) -> dict[str, Any]:
    """Return medians of forward step and draw of ours, seconds of processor time."""
    result = {}
    with running([entrant for entrant in found if entrant.kind.startswith("edgeduet")], 1, models) as processes:
        for process in processes:
            forward, draw = [], []
            for number in range(3):
                answer = process.ask("steps", prompt=part_of(text, 64, number), tokens=96)
                forward += answer["forward"]
                draw += answer["draw"]
            result[process.entrant.name] = {"forward": statistics.median(forward), "draw": statistics.median(draw)}
    return result


def measure_perplexity(found: Sequence[Entrant], text: Sequence[int], models: Path | None) -> dict[str, float]:
    """Return the mean negative log-likelihood of the text, nats per token, by runtime."""
    result = {}
    for entrant in found:
        if not entrant.kind.endswith("p-less"):
            with running([entrant], 1, models) as (process,):
                result[entrant.name] = process.ask("perplexity", ids=list(text))["nll"]
    return result


def measure_cold(found: Sequence[Entrant], text: Sequence[int], rounds: int, models: Path | None) -> dict[str, Any]:
    """Return, by runtime, wall and processor seconds from starting Python to the first token, and memory in bytes."""
    result: dict[str, Any] = {}
    for number in range(rounds):
        for entrant in in_turn(found, number):
            with running([entrant], 1, models) as (process,):
                first = process.ask("generate", prompt=part_of(text, 64, 0), tokens=1)
                wall = time.perf_counter() - process.started
                process.ask("generate", prompt=part_of(text, 512, 0), tokens=TOKENS)
                facts = {"wall": wall, "cpu": first["cpu"], **process.ask("memory")}
            for name, value in facts.items():
                result.setdefault(entrant.name, {}).setdefault(name, []).append(value)
        print(f"cold start, round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return result


def measure_imports(rounds: int) -> dict[str, Any]:
    """Return, by what is imported, wall and processor seconds and peak memory of a fresh process."""
    result: dict[str, Any] = {}
    for _ in range(rounds):
        for name, code in IMPORTS.items():
            started = time.perf_counter()
            command = [sys.executable, "-c", code + AFTER_IMPORT]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            wall = time.perf_counter() - started
            if done.returncode != 0:
                print(f"left out: {name}: {done.stderr.strip().splitlines()[-1]}")
                continue
            for key, value in {"wall": wall, **json.loads(done.stdout)}.items():
                result.setdefault(name, {}).setdefault(key, []).append(value)
    return result


def part_of(text: Sequence[int], length: int, number: int) -> list[int]:
    """Return another stretch of the text every round."""
    start = (number * 29) % (len(text) - length + 1)
    return list(text[start : start + length])


def fixed_text(options: argparse.Namespace) -> list[int]:
    """Return the ids of the text that imports are checked with."""
    from tokenizers import Tokenizer

    from edgeduet_client.llm.import_checks import check_text
    from edgeduet_client.llm.model_folder import TOKENIZER, ModelFolder

    folder = ModelFolder.open(options.model_int8, options.models)
    tokenizer = Tokenizer.from_file(str(folder.path / TOKENIZER))
    ids: list[int] = tokenizer.encode(check_text(), add_special_tokens=False).ids
    return ids


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--rounds", type=int, default=8, help="of the speed part (default: %(default)s)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--label", default="", help="of this variant of ours: its speed stands beside other variants'")
    add_options(parser)
    parser.add_argument(
        "--out", type=Path, default=Path("llm_speed_bench.json"), help="numbers; tables beside it (.md)"
    )
    options = parser.parse_args()
    rounds = 2 if options.quick else options.rounds
    report: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name, part in measured(options, rounds):
        report[name] = {"date": f"{datetime.now(UTC):%Y-%m-%d}", **part}
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    text = tables(report)
    options.out.with_suffix(".md").write_text(text)
    print(text)
    print(f"written to {options.out} and {options.out.with_suffix('.md')}")


def measured(options: argparse.Namespace, rounds: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the parts that were asked for as they are done."""
    if not options.parts:
        return
    found, text = entrants(options), fixed_text(options)
    if "steps" in options.parts:
        yield "steps", {"seconds": measure_steps(found, text, options.models)}
    if "perplexity" in options.parts:
        yield "perplexity", {"tokens": len(text), "nll": measure_perplexity(found, text, options.models)}
    if "speed" in options.parts:
        for threads in options.threads:
            name = f"speed, {threads} thread{'s' if threads > 1 else ''}{options.label and ', ' + options.label}"
            yield name, measure_speed(found, text, threads, rounds, options.models)
    if "cold" in options.parts:
        yield "cold", {"processes": measure_cold(found, text, min(rounds, 3), options.models)}
    if "import" in options.parts:
        yield "import", {"processes": measure_imports(min(rounds, 3))}


if __name__ == "__main__":
    main()
