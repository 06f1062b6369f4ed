"""Which runtimes can be compared on this machine, and one process for each, fed in turn."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("llm_peers.py")


@dataclass(frozen=True)
class Entrant:
    """A runtime, its weights, and the Python that has it.

    Attributes:
        name: as in the tables.
        kind: what :func:`llm_peers.open_peer` calls it.
        model: path, or name of an imported model.
    """

    name: str
    kind: str
    model: str
    python: str = sys.executable


class PeerProcess:
    """A runtime in a process of its own.

    Attributes:
        load: what it said when it was ready.
        seconds_to_ready: from starting the process.
    """

    def __init__(self, entrant: Entrant, threads: int, models: Path | None) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        if models is not None:
            environment["EDGEDUET_MODELS"] = str(models)
        command = [entrant.python, str(WORKER), entrant.kind, entrant.model, "--threads", str(threads)]
        self.entrant = entrant
        self.started = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        self.load = self._read()
        self.seconds_to_ready = time.perf_counter() - self.started

    def ask(self, do: str, **facts: Any) -> dict[str, Any]:
        """Send a request and return the answer."""
        if self._process.stdin is None:
            raise RuntimeError("a peer without a pipe")
        self._process.stdin.write(json.dumps({"do": do, **facts}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=60)

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            code = self._process.wait(timeout=60)
            raise SystemExit(
                f"{self.entrant.name} ended with exit code {code}; to see why: {' '.join(map(str, self._process.args))}"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where models and peers are."""
    parser.add_argument("--models", type=Path, help="folder of imported models (default: as edgeduet-client)")
    parser.add_argument("--model", default="smollm2-135m", help="ours, the GGUF file's own blocks")
    parser.add_argument("--model-int8", default="smollm2-135m-int8", help="ours, imported with --quantize int8")
    parser.add_argument("--gguf", type=Path, help="the same weights for llama.cpp")
    parser.add_argument("--llama-python", type=Path, help="Python that has llama-cpp-python, perhaps of another venv")
    parser.add_argument("--genai-int8", type=Path, help="folder written by onnxruntime_genai.models.builder -p int8")
    parser.add_argument("--genai-int8-128", type=Path, help="the same with block_size=128, its faster setting")
    parser.add_argument("--genai-int4", type=Path, help="the same with -p int4")
    parser.add_argument("--hf", type=Path, help="the same weights as a Hugging Face folder, for transformers")
    parser.add_argument("--work", type=Path, default=Path(), help="where the Q8_0 file is put (default: here)")


def entrants(options: argparse.Namespace) -> list[Entrant]:
    """Return what can take part; a line says what cannot, and why."""
    found = [
        Entrant("edgeduet int8, greedy", "edgeduet greedy", options.model_int8),
        Entrant("edgeduet int8, p-less", "edgeduet p-less", options.model_int8),
        Entrant("edgeduet own 4-bit blocks, greedy", "edgeduet greedy", options.model),
        Entrant("edgeduet own 4-bit blocks, p-less", "edgeduet p-less", options.model),
    ]
    for name, folder, option in (
        ("genai int8", options.genai_int8, "--genai-int8"),
        ("genai int8, blocks of 128", options.genai_int8_128, "--genai-int8-128"),
        ("genai int4", options.genai_int4, "--genai-int4"),
    ):
        if _there(name, folder, option) and _importable(sys.executable, "onnxruntime_genai", name):
            found.append(Entrant(name, "genai", str(folder)))
    python = str(options.llama_python or sys.executable)
    if _there("llama.cpp", options.gguf, "--gguf") and _importable(python, "llama_cpp", "llama.cpp"):
        found.append(Entrant("llama.cpp, the GGUF file", "llama.cpp", str(options.gguf), python))
        found.append(
            Entrant("llama.cpp Q8_0", "llama.cpp", str(_as_8_bits(options.gguf, options.work, python)), python)
        )
    if _there("transformers", options.hf, "--hf") and _importable(sys.executable, "transformers", "transformers"):
        found.append(Entrant("transformers float32", "transformers", str(options.hf)))
    return found


def _there(name: str, path: Path | None, option: str) -> bool:
    if path is not None and path.exists():
        return True
    print(f"left out: {name}: {'give ' + option if path is None else f'{path} does not exist'}", flush=True)
    return False


def _importable(python: str, module: str, name: str) -> bool:
    if subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False).returncode == 0:
        return True
    print(f"left out: {name}: {python} has no {module}", flush=True)
    return False


def _as_8_bits(gguf: Path, work: Path, python: str) -> Path:
    target = work / f"{gguf.stem}.as-Q8_0.gguf"
    if not target.exists():
        part = target.with_suffix(".part")
        command = [python, str(WORKER), "llama.cpp", str(gguf), "--quantise-to", str(part)]
        subprocess.run(command, check=True, capture_output=True)
        part.rename(target)
    return target


def in_turn(items: Sequence[Any], number: int) -> list[Any]:
    """Return the items starting with another one every round, so that none always follows the same."""
    place = number % len(items)
    return [*items[place:], *items[:place]]


def machine(peers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return processor, cores, load and the versions the peers told."""
    with open("/proc/cpuinfo") as lines:
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "load": [round(value, 1) for value in os.getloadavg()],
        "versions": {name: version for load in peers.values() for name, version in load["versions"].items()},
    }
