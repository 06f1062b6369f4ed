"""p-less sampling against greedy and the usual samplers, over temperatures: right answers, and texts that go on freely.

    python simulations/benchmarks/pless_quality_bench.py                  # 25 minutes on a quiet core
    python simulations/benchmarks/pless_quality_bench.py --quick          # 3 minutes, to see that it runs
    python simulations/benchmarks/pless_quality_bench.py --finish         # time is up: judge and report what is there

needs the imported models `smollm2-135m` and `gemma3-270m-int8` (edgeduet-client llm import; --model and --judge name
others) and the packages countryinfo, num2words and matplotlib. Steps that several answers share are computed once.

Part 1, right answers: questions a small model can answer (word problems with the sum written out, numbers in words,
capitals), told by examples. Every question is answered by every sampler at every temperature with every seed; greedy
decoding answers once. Top-p and min-p are tuned before on other questions, over all temperatures and tasks: one value
each, as whoever deploys them must choose one. Seeds are shared between samplers, so that differences are paired.

Part 2, free texts: 40 tokens after an opening, none shorter. Quality is the perplexity of the text under another
model (low is not always good: a text that repeats itself is easy to predict, hence the share of repeated trigrams).
Diversity is over the texts of the same opening with different seeds: distinct bigrams, and how much of one text is in
the others.

Every answer is one line of a log, written at once: whatever kills this script costs one answer, and starting it
again goes on. Questions and openings are taken in turn through all parts and samplers, so that what is there at any
time is a fair, if smaller, benchmark; tables and picture use complete questions only.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from pless_quality_report import Context, write_report
from pless_quality_tasks import OPENINGS, GradedTask, graded_tasks
from pless_quality_trials import (
    FREE,
    FREE_TOKENS,
    QUICK,
    TUNED,
    Size,
    Trial,
    measured_trials,
    sampler_label,
    tuning_trials,
)
from remembered_steps import RememberedSteps


class Log:
    """Records by key, each a line of a file that is on disk before the next is made.

    Args:
        path: made if missing; a last line cut off by a crash is dropped.
        setting: what the records depend on. A file of another setting is refused.
    """

    def __init__(self, path: Path, setting: Mapping[str, Any]) -> None:
        self.records: dict[str, dict[str, Any]] = {}
        whole = path.read_bytes().rpartition(b"\n")[0] + b"\n" if path.exists() and path.stat().st_size else b""
        lines = [json.loads(line) for line in whole.splitlines() if line]
        if lines and lines[0] != {"setting": dict(setting)}:
            raise SystemExit(f"{path} was made with {lines[0].get('setting')}, not {dict(setting)}; give another --log")
        self._file = path.open("r+b" if path.exists() else "w+b")
        self._file.truncate(len(whole) if lines else 0)
        self._file.seek(0, os.SEEK_END)
        if not lines:
            self._write({"setting": dict(setting)})
        for record in lines[1:]:
            self.records[record["key"]] = record

    def __contains__(self, key: str) -> bool:
        return key in self.records

    def add(self, key: str, **facts: Any) -> None:
        """Write a record."""
        self.records[key] = {"key": key, **facts}
        self._write(self.records[key])

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


class Writer:
    """Answers trials with the model under test."""

    def __init__(self, model: Any, tasks: Sequence[GradedTask]) -> None:
        # Answers to one question share most of their tokens: no step is computed twice.
        self._model = replace(model, session=RememberedSteps(model.session))
        self._tasks = {task.name: task for task in tasks}
        # One cache per task: the examples in front of every question of a task are read once.
        self._caches = {name: self._model.new_cache() for name in (*self._tasks, FREE)}

    def answer(self, trial: Trial) -> dict[str, Any]:
        """Return the text, and for a graded task whether it is right."""
        if trial.task == FREE:
            limits = {"min_tokens": FREE_TOKENS, "max_tokens": FREE_TOKENS}
            return {"text": self._write(OPENINGS[trial.item], trial, **limits)}
        task = self._tasks[trial.task]
        question = (task.tuning if trial.part == "tuning" else task.questions)[trial.item]
        text = self._write(question.prompt, trial, max_tokens=task.max_tokens, stop=("\n",))
        return {"text": text, "correct": task.correct(question, text)}

    def _write(self, prompt: str, trial: Trial, **limits: Any) -> str:
        from edgeduet_client.llm.generate import TextPiece
        from edgeduet_client.llm.request import GenerationRequest

        heat = {} if trial.temperature is None else {"temperature": trial.temperature}
        request = GenerationRequest(**trial.settings, **heat, **limits, seed=trial.request_seed, gate="off")
        prompt_ids = self._model.tokenizer.encode_prompt(prompt)
        events = self._model.generate(prompt_ids, request, cache=self._caches[trial.task])
        return "".join(event.text for event in events if isinstance(event, TextPiece))


def run_trials(trials: Iterable[Trial], writer: Writer, log: Log, title: str) -> None:
    """Answer what the log does not hold yet."""
    from rich.console import Console
    from rich.progress import track

    missing = [trial for trial in trials if trial.key not in log]
    for trial in track(missing, title, console=Console(stderr=True), disable=not Console(stderr=True).is_terminal):
        facts = writer.answer(trial)
        log.add(trial.key, **asdict(trial), **facts)


def choose_values(tasks: Sequence[GradedTask], log: Log) -> list[dict[str, Any]]:
    """Return the best setting of each tuned sampler: most right answers over all tasks and temperatures."""
    chosen = []
    for sampler, grid in TUNED.items():
        options = [{"sampler": sampler, sampler.replace("-", "_"): value} for value in grid]
        scores = []
        for settings in options:
            label = sampler_label(settings)
            right: dict[str, list[bool]] = {task.name: [] for task in tasks}
            for trial in tuning_trials(tasks):
                if trial.sampler == label:
                    right[trial.task].append(log.records[trial.key]["correct"])
            scores.append(float(np.mean([np.mean(values) for values in right.values()])))
        chosen.append(options[int(np.argmax(scores))])
        print(f"{sampler}: " + ", ".join(f"{v:g}: {s:.3f}" for v, s in zip(grid, scores, strict=True)), flush=True)
    return chosen


def judge_texts(judge: Any, trials: Iterable[Trial], log: Log) -> None:
    """Have the judge read what was written freely: mean negative log-likelihood per token of its own."""
    from rich.console import Console
    from rich.progress import track

    trials = list(trials)
    unanswered = {trial.item for trial in trials if trial.key not in log}
    missing = [trial for trial in trials if trial.item not in unanswered and trial.judged_key not in log]
    seen: dict[tuple[int, str], float] = {}
    cache = judge.new_cache()
    for trial in track(missing, "judging", console=Console(stderr=True), disable=not Console(stderr=True).is_terminal):
        text = log.records[trial.key]["text"]
        place = (trial.item, text)
        if place not in seen:
            seen[place] = negative_log_likelihood(judge, cache, OPENINGS[trial.item], text)
        log.add(trial.judged_key, nll=seen[place])


def negative_log_likelihood(judge: Any, cache: Any, opening: str, text: str) -> float:
    """Return the judge's mean negative log-likelihood per token of ``text`` after ``opening``, in nats."""
    head = judge.tokenizer.encode_prompt(opening)
    whole = [*head, *judge.tokenizer.encode(text)]
    if len(whole) == len(head):
        raise SystemExit(f"nothing to judge after {opening!r}")
    cache.crop(0)
    rows = range(len(head) - 1, len(whole) - 1)
    logits = judge.session.prefill(whole[:-1], cache, rows=rows).logits.astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(rows)), whole[len(head) :]]
    return float(losses.mean())


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="few questions; the intervals say nothing then")
    parser.add_argument("--finish", action="store_true", help="answer nothing more: judge and report what is there")
    parser.add_argument("--report", action="store_true", help="nor judge: only report what the log holds")
    parser.add_argument("--model", default="smollm2-135m", help="model under test (default: %(default)s)")
    parser.add_argument("--judge", default="gemma3-270m-int8", help="model that reads (default: %(default)s)")
    parser.add_argument("--models", type=Path, help="folder of imported models (default: as edgeduet-client)")
    parser.add_argument("--threads", type=int, default=1)
    for name, what in (("questions", "per task"), ("openings", f"at most {len(OPENINGS)}"), ("seeds", "3 or more")):
        parser.add_argument(f"--{name}", type=int, default=getattr(Size, name), help=f"{what} (default: %(default)s)")
    parser.add_argument("--log", type=Path, default=Path("pless_quality.jsonl"), help="every answer, a line each")
    parser.add_argument("--out", type=Path, default=Path("pless_quality_bench.md"), help="tables; picture beside it")
    options = parser.parse_args()
    if not 1 <= options.openings <= len(OPENINGS) or options.seeds < 2:
        parser.error(f"give 1 to {len(OPENINGS)} openings and at least 2 seeds")
    size = QUICK if options.quick else Size(Size.tuning, options.questions, options.openings, options.seeds)
    run(options, size)


def run(options: argparse.Namespace, size: Size) -> None:
    """Answer, judge, report; each goes on where the log ends."""
    from edgeduet_client.llm.local_model import LocalModel
    from edgeduet_client.llm.model_folder import ModelFolder

    folders = {role: ModelFolder.open(getattr(options, role), options.models) for role in ("model", "judge")}
    setting = {role: folder.manifest.files["model.onnx.data"].sha256 for role, folder in folders.items()}
    tasks = graded_tasks(size.tuning, size.questions)
    log = Log(options.log, {**setting, **asdict(size)})
    answering = not (options.finish or options.report)
    if answering:
        writer = Writer(LocalModel.open(folders["model"], threads=options.threads), tasks)
        run_trials(tuning_trials(tasks), writer, log, "tuning")
    if any(trial.key not in log for trial in tuning_trials(tasks)):
        raise SystemExit(f"{options.log} holds no complete tuning yet; run without --finish or --report first")
    tuned = choose_values(tasks, log)
    trials = list(measured_trials(tasks, size, tuned))
    if answering:
        run_trials(trials, writer, log, "answering")
        del writer
    if not options.report:
        judge = LocalModel.open(folders["judge"], threads=options.threads)
        judge_texts(judge, (trial for trial in trials if trial.task == FREE), log)
    manifests = {role: folder.manifest for role, folder in folders.items()}
    context = Context(manifests["model"], manifests["judge"], size, tuned, options.threads)
    write_report(trials, log.records, context, options.out)
    print(f"written to {options.out} and {options.out.with_suffix('.png')}")


if __name__ == "__main__":
    main()
