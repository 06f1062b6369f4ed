"""Run folders for tests of results and reports: the real recorder and the real folder, plausible accuracies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from edgeduet_server.recorder import JsonlRecorder
from edgeduet_shared.config import Scenario
from edgeduet_shared.method_spec import MethodSpec
from edgeduet_sim.results import FORMAT, RunFolder, run_digest, run_folder

TASKS = ("photo", "cartoon", "sketch", "painting")
IMAGES = 100  # common test images per task
SLICE = 20  # test images of a client per task


def small_scenario(**federation: Any) -> Scenario:
    """Four stages, five clients, two rounds."""
    values = {"clients": 5, "rounds": 2, **federation}
    return Scenario.model_validate({"name": "small", "purpose": "four styles, five clients", "federation": values})


def accuracies_of(method: str, seed: int) -> np.ndarray:
    """A plausible accuracy matrix (T, T) per method: fed-duet forgets least, zero-shot never changes."""
    t = len(TASKS)
    base = np.array([0.7, 0.55, 0.45, 0.35])
    gain, loss = {"zero-shot": (0, 0), "fed-duet": (0.3, 0.02), "joint": (0.35, 0.0), "local": (0.2, 0.09)}.get(
        method, (0.25, 0.06)
    )
    noise = np.random.default_rng([seed, len(method)]).normal(0, 0.01, (t, t)) if gain else 0
    stages, tasks = np.indices((t, t))
    trained = np.where(tasks <= stages, gain - loss * (stages - tasks), 0.1 * gain)
    return np.clip(base[None, :] + trained + noise, 0, 1)


def record_run(
    out: Path,
    method: str = "fed-duet",
    seed: int = 0,
    *,
    scenario: Scenario | None = None,
    stages: int | None = None,
    finish: bool = True,
    skipped: bool = False,
    changes: dict[str, Any] | None = None,
) -> Path:
    """Write one run folder below ``out``; ``finish=False`` leaves it as a kill would."""
    scenario = scenario or small_scenario()
    spec = MethodSpec.parse(method)
    t, m = len(TASKS), scenario.federation.clients
    communicates = spec.name not in ("zero-shot", "local", "joint")
    config = {
        "format": FORMAT,
        "digest": run_digest(scenario, spec, seed),
        "scenario": scenario.model_dump(mode="json"),
        "method": spec.name,
        "options": dict(spec.options),
        "seed": seed,
        "versions": {"python": "3.11", "torch": "2"},
        "git": "0123456789abcdef",
        "command": ["edgeduet-sim", "run", "small", "--method", method],
        "split": f"split-of-seed-{seed}",
        "tasks": list(TASKS),
        "client_images": [10 * (c + 1) for c in range(m)],
        "parameters": {"trainable": 5000, "uploaded": 3000 if communicates else 0, "personal": 2000},
        "zero_shot": {"correct": [70, 55, 45, 35], "totals": [IMAGES] * t, "held_out": [30, 50]},
        **(changes or {}),
    }
    folder = RunFolder(run_folder(out, scenario, spec, seed), config["digest"], resume=False)
    folder.begin(config)
    recorder = JsonlRecorder(folder.events)
    rng = np.random.default_rng([seed, m])
    matrix = accuracies_of(spec.name, seed) - 0.02 * len(spec.options)
    recorder.record("run-start", stages=t)
    for stage in range(t if stages is None else stages):
        recorder.record("stage-start", stage=stage)
        for round in range(scenario.federation.rounds):
            recorder.record(
                "round",
                stage=stage,
                round=round,
                asked=list(range(m)),
                skipped=skipped and (stage, round) == (0, 0),
                clients=[{"client": c, "examples": 10, "loss": 0.5, "accuracy": 0.8, "steps": 3} for c in range(m)],
                rejected={"no-answer": 2} if skipped and (stage, round) == (0, 0) else {},
                failures=[],
                missing=[],
                loss=1 / (1 + stage + round),
                accuracy=0.8,
                trained=["prompt"],
                dispatch={str(c): rng.choice(64, 8, replace=False).tolist() for c in range(m)}
                if spec.name == "fed-duet"
                else {},
                bytes_down=40_000 * communicates,
                bytes_up=(20_000 + 1_000 * len(method)) * communicates,
                timing={"seconds": 1.5, "client_seconds": 1.0},
            )
        row = matrix[stage]
        own = np.clip(row[None, :] + rng.normal(0.05, 0.05, (m, t)), 0, 1)
        recorder.record(
            "evaluate",
            stage=stage,
            clients=[
                {
                    "client": c,
                    "personal": np.rint(own[c] * SLICE).astype(int).tolist(),
                    "shared": np.rint(row * SLICE).astype(int).tolist(),
                    "totals": [SLICE] * t,
                    "personal_common": np.rint(row * IMAGES).astype(int).tolist(),
                    "common_totals": [IMAGES] * t,
                }
                for c in range(m)
            ],
            absent=[],
            failures=[],
            common={
                "correct": np.rint(row * IMAGES).astype(int).tolist(),
                "totals": [IMAGES] * t,
                "held_out": 28,
                "held_out_total": 50,
            },
            bytes_down=10,
            bytes_up=10,
            timing={"seconds": 0.5, "client_seconds": 0.4},
        )
    if finish:
        recorder.record("run-end", skipped_rounds=int(skipped))
        folder.finish()
    recorder.close()
    return folder.path
