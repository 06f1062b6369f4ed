"""What an answer of the personal classifier costs a device: ONNX Runtime against torch, from a cold start.

    python simulations/benchmarks/classifier_bench.py            # five starts of each, two minutes on 2 cores

The same personal model (every part: adapters, experts, prompt, fusion) of the generated world's backbone answers
one picture in a fresh process: once as ``edgeduet-client classify`` does it, once with torch as training would.
Measured from outside, over the whole process: wall and CPU seconds from start to exit, peak memory (resident);
from inside: seconds per further picture. Both must name the same class. Starts alternate, so that what else the
machine does meets both; CPU seconds, memory and ratios are what to compare.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

WARM_PICTURES = 20
WAYS = ("onnx", "torch")


@dataclass
class Cost:
    """One cold start.

    Attributes:
        wall: seconds from start to exit.
        cpu: CPU seconds, user and system.
        memory: peak resident bytes.
        warm: seconds per picture after the first.
    """

    way: str
    wall: float
    cpu: float
    memory: int
    warm: float
    answer: str


def prepare(folder: Path) -> None:
    """Write the model for both ways, and a picture."""
    import torch
    from PIL import Image
    from safetensors.torch import save_file

    from edgeduet_client.classifier.classifier_folder import ClassifierFolder
    from edgeduet_client.classifier.exporting import export_classifier

    predict, parameters, backbone, names = _personal(folder, fresh=True)
    save_file(parameters, folder / "personal.safetensors")
    seen = range(len(names))
    export_classifier(
        predict, backbone, ClassifierFolder(folder / "classifier"), run="bench", client=0, stage=0,
        class_names=names, seen=seen,
    )  # fmt: skip
    pixels = torch.randint(0, 255, (96, 96, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(folder / "picture.png")


def _personal(folder: Path, *, fresh: bool):  # type: ignore[no-untyped-def]
    import torch
    from safetensors.torch import load_file

    from edgeduet_shared.backbone import load_backbone
    from edgeduet_shared.config import Scenario
    from edgeduet_shared.duet import DuetModel
    from edgeduet_shared.evaluation import predictor
    from edgeduet_shared.plan import Parts
    from edgeduet_shared.world import SHAPES

    torch.set_num_threads(1)
    backbone, names, config = load_backbone("clip-world"), SHAPES, Scenario(name="bench").model
    model = DuetModel(backbone, names, config, Parts(adapters=True, experts=True, prompt=True, fusion=True))
    source = torch.Generator().manual_seed(0)
    if fresh:
        initial = model.initial(0)
        values = {name: value + 0.05 * torch.randn(value.shape, generator=source) for name, value in initial.items()}
        width = values["prompt.context"].shape[1]
        values["contexts"] = 0.05 * torch.randn(4, config.prompt.length, width, generator=source)
    else:
        values = load_file(folder / "personal.safetensors")
    parameters = {name: value for name, value in values.items() if name != "contexts"}
    return predictor(model, parameters, len(names), contexts_MLW=values["contexts"]), values, backbone, names


def answer_onnx(folder: Path) -> tuple[str, float]:
    """Answer the picture as ``edgeduet-client classify`` does; return class and seconds per further picture."""
    from edgeduet_client.classifier.classifier_folder import ClassifierFolder
    from edgeduet_client.classifier.classifying import Classifier, open_image

    image = open_image(folder / "picture.png", "picture")
    classifier = Classifier(ClassifierFolder(folder / "classifier"))
    (found,) = classifier.classify([image], top=1)
    started = time.perf_counter()
    for _ in range(WARM_PICTURES):
        classifier.classify([image], top=1)
    return found.classes[0], (time.perf_counter() - started) / WARM_PICTURES


def answer_torch(folder: Path) -> tuple[str, float]:
    """Answer the picture with the model that was trained; return class and seconds per further picture."""
    import torch
    from PIL import Image

    image = Image.open(folder / "picture.png").convert("RGB")
    predict, _, backbone, names = _personal(folder, fresh=False)

    @torch.no_grad()
    def classify() -> str:
        pixels = backbone.transform(image)[None]
        return names[int(predict.logits(predict.model.front(pixels)).argmax())]

    name = classify()
    started = time.perf_counter()
    for _ in range(WARM_PICTURES):
        classify()
    return name, (time.perf_counter() - started) / WARM_PICTURES


def measure(way: str, folder: Path) -> Cost:
    """Answer in a process of its own."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    command = [sys.executable, __file__, "--way", way, "--folder", str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    wall = time.monotonic() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    inside = json.loads(done.stdout)
    return Cost(way, wall, cpu, inside["memory"], inside["warm"], inside["answer"])


def _answer_here(way: str, folder: Path) -> None:
    answer, warm = answer_onnx(folder) if way == "onnx" else answer_torch(folder)
    print(json.dumps({"answer": answer, "warm": warm, "memory": _peak_memory()}))


def _peak_memory() -> int:
    # Not ru_maxrss: that one begins with what the process had that started this one.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


def table(costs: Sequence[Cost]) -> str:
    """Return medians and ratios as Markdown."""
    rows = ["| | wall s | CPU s | peak MB | ms per further picture |", "| --- | ---: | ---: | ---: | ---: |"]
    medians = {}
    for way in WAYS:
        mine = [cost for cost in costs if cost.way == way]
        wall, cpu, memory, warm = (
            statistics.median(getattr(cost, name) for cost in mine) for name in ("wall", "cpu", "memory", "warm")
        )
        medians[way] = (wall, cpu, memory / 1e6, warm * 1e3)
        rows.append(f"| {way} | {wall:.2f} | {cpu:.2f} | {memory / 1e6:.0f} | {warm * 1e3:.1f} |")
    ratios = [b / a for a, b in zip(medians["onnx"], medians["torch"], strict=True)]
    rows.append("| torch / onnx | " + " | ".join(f"{ratio:.1f}" for ratio in ratios) + " |")
    return "\n".join(rows)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=5, help="cold starts of each way")
    parser.add_argument("--json", type=Path, help="also write every measurement there")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        _answer_here(arguments.way, arguments.folder)
        return 0
    with tempfile.TemporaryDirectory(prefix="edgeduet-bench-") as name:
        folder = Path(name)
        prepare(folder)
        costs = [measure(way, folder) for _ in range(arguments.starts) for way in WAYS]
    answers = {cost.answer for cost in costs}
    if len(answers) > 1:
        print(f"the two do not agree: {sorted(answers)}", file=sys.stderr)
        return 1
    print(table(costs))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(cost) for cost in costs], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
