"""What an answer of the personal classifier costs a device: ONNX Runtime against torch, from a cold start.

    python simulations/benchmarks/classifier_bench.py            # five starts of each, two minutes on 2 cores

The same personal model (every part: adapters, experts, prompt, fusion) of the generated world's backbone answers
one picture in a fresh process: once as ``edgeduet-client classify`` does it, once with torch as training would.
Measured: wall and CPU seconds from the start of the process to its first answer, peak memory (resident) until
then, and CPU seconds of the process per further picture (all its threads, 200 pictures after 20 that are not
counted). Both must name the same class. Starts alternate, so that what else the machine does meets both; CPU
seconds, memory and ratios are what to compare.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

WARM_UP, COUNTED = 20, 200
"""Further pictures: the first ones still fill caches and arenas."""
WAYS = ("onnx", "torch")


@dataclass
class Cost:
    """One cold start.

    Attributes:
        wall: seconds from the start of the process to the first answer.
        cpu: CPU seconds until then, user and system, of all threads.
        memory: peak resident bytes.
        further: CPU seconds per further picture.
    """

    way: str
    wall: float
    cpu: float
    memory: int
    further: float
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


@dataclass
class Answer:
    """The class, and the moment at which it was known: monotonic clock, and CPU seconds of the process."""

    name: str
    at: float
    cpu: float

    @classmethod
    def now(cls, name: str) -> Answer:
        """The answer is known now."""
        return cls(name, time.monotonic(), time.process_time())


def answer_onnx(folder: Path) -> tuple[Answer, Callable[[], object]]:
    """Answer the picture as ``edgeduet-client classify`` does; return the answer and what answers it once more."""
    from edgeduet_client.classifier.classifier_folder import ClassifierFolder
    from edgeduet_client.classifier.classifying import Classifier, open_image

    image = open_image(folder / "picture.png", "picture")
    classifier = Classifier(ClassifierFolder(folder / "classifier"))
    (found,) = classifier.classify([image], top=1)
    return Answer.now(found.classes[0]), lambda: classifier.classify([image], top=1)


def answer_torch(folder: Path) -> tuple[Answer, Callable[[], object]]:
    """Answer the picture with the model that was trained; return the answer and what answers it once more."""
    import torch
    from PIL import Image

    image = Image.open(folder / "picture.png").convert("RGB")
    predict, _, backbone, names = _personal(folder, fresh=False)

    @torch.no_grad()
    def classify() -> str:
        pixels = backbone.transform(image)[None]
        return names[int(predict.logits(predict.model.front(pixels)).argmax())]

    return Answer.now(classify()), classify


def _further(classify: Callable[[], object]) -> float:
    """CPU seconds per picture, once warm."""
    for _ in range(WARM_UP):
        classify()
    started = time.process_time()
    for _ in range(COUNTED):
        classify()
    return (time.process_time() - started) / COUNTED


def measure(way: str, folder: Path) -> Cost:
    """Answer in a process of its own."""
    started = time.monotonic()
    command = [sys.executable, __file__, "--way", way, "--folder", str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    inside = json.loads(done.stdout)
    return Cost(way, inside["at"] - started, inside["cpu"], inside["memory"], inside["further"], inside["name"])


def _answer_here(way: str, folder: Path) -> None:
    answer, once_more = answer_onnx(folder) if way == "onnx" else answer_torch(folder)
    memory = _peak_memory()
    print(json.dumps({**asdict(answer), "further": _further(once_more), "memory": memory}))


def _peak_memory() -> int:
    # Not ru_maxrss: that one begins with what the process had that started this one.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


def table(costs: Sequence[Cost]) -> str:
    """Return medians and ratios as Markdown."""
    rows = ["| | wall s | CPU s | peak MB | CPU ms per further picture |", "| --- | ---: | ---: | ---: | ---: |"]
    medians, spread = {}, []
    for way in WAYS:
        mine = [cost for cost in costs if cost.way == way]
        wall, cpu, memory, further = (
            statistics.median(getattr(cost, name) for cost in mine) for name in ("wall", "cpu", "memory", "further")
        )
        medians[way] = (wall, cpu, memory / 1e6, further * 1e3)
        rows.append(f"| {way} | {wall:.2f} | {cpu:.2f} | {memory / 1e6:.0f} | {further * 1e3:.2f} |")
        few, many = min(cost.further for cost in mine), max(cost.further for cost in mine)
        spread.append(f"{way} {few * 1e3:.2f} to {many * 1e3:.2f}")
    ratios = [b / a for a, b in zip(medians["onnx"], medians["torch"], strict=True)]
    rows.append("| torch / onnx | " + " | ".join(f"{ratio:.1f}" for ratio in ratios) + " |")
    return "\n".join([*rows, "", f"CPU ms per further picture over the starts: {', '.join(spread)}"])


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
