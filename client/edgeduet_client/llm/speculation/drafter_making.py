"""Make a drafter for a model on the device itself: let the target write, train, export.

Whatever interrupts it (a signal, a power cut), the same command goes on: read texts are kept one by one, training
every hundred updates, both in the user's cache folder; the model's folder changes at the very end only.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
from pydantic import BaseModel, ConfigDict, Field

from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.free_memory import available_memory
from edgeduet_client.llm.gate import ModelBinding
from edgeduet_client.llm.local_model import LocalModel
from edgeduet_client.llm.model_folder import ModelFolder
from edgeduet_client.llm.speculation.drafter_artefact import DrafterCard, refuse_taken
from edgeduet_client.llm.speculation.drafter_corpus import choose_prompts
from edgeduet_client.llm.speculation.drafter_dataset import LABELS, DrafterDataset
from edgeduet_client.llm.speculation.drafter_export import choose_vocabulary, export
from edgeduet_client.llm.speculation.drafter_reading import ReadingOptions, TextStore, encode_prompts, read_texts
from edgeduet_client.llm.speculation.drafter_training import (
    DrafterConfig,
    Parameters,
    TrainingState,
    initial_parameters,
    train,
)
from edgeduet_client.llm.speculation.target_tables import target_tables
from edgeduet_shared.atomic_files import atomic_output

ProgressCallback = Callable[[str, int, int], None]
"""Called with (what is being done, steps done, steps in all)."""

_HELD_OUT = 0.08
_READING_SHARE = 0.5  # of the minutes
_PASSES = 4  # more only make it know the texts by heart (measured: at 9, 92 % on them and no more on others)
_TRIAL = 4  # updates whose time says how many fit


class MakingOptions(BaseModel):
    """How to make a drafter."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field("recurrent", description="of the drafter")
    positions: int = Field(250_000, ge=200, description="tokens of text the target reads and writes")
    per_domain: int = Field(1000, ge=2, description="prompts of each sort of text, at most")
    vocabulary: int = Field(8192, ge=16, description="ids the drafter may propose")
    inner_width: int = Field(768, ge=1, description="width of its gated layer")
    steps: int | None = Field(None, ge=1, description="updates, with minutes at most; default: four passes")
    batch: int = Field(384, ge=1, description="starts per update")
    learning_rate: float = Field(1e-3, gt=0, description="peak learning rate")
    minutes: float | None = Field(None, gt=0, description="time to take, reading and training together")
    memory_mb: int | None = Field(None, gt=0, description="memory to take beside the model's, MB")
    replace: bool = Field(False, description="replace a drafter of that name")
    seed: int = Field(0, ge=0, description="draws, initial parameters, order of the starts")
    reading: ReadingOptions = Field(default_factory=ReadingOptions)


def make_drafter(
    model: str | Path | ModelFolder,
    *,
    corpus: Path | str | None = None,
    languages: Sequence[str] | None = None,
    options: MakingOptions | None = None,
    root: Path | None = None,
    threads: int | None = None,
    work: Path | None = None,
    clock: Callable[[], float] = time.monotonic,
    progress: ProgressCallback = lambda what, done, total: None,
) -> DrafterCard:
    """Make a drafter and store it in the model's folder.

    Args:
        model: an imported model's name, a path, or an open folder.
        corpus: folder of texts (:mod:`.drafter_corpus`); or
        languages: codes of packaged languages; neither: what Python ships.
        options: settings.
        root: where models lie.
        threads: cores to use.
        work: folder for what is kept between calls; default in the user's cache folder.
        clock: seconds.
        progress: told about every text and every update.

    Raises:
        ModelError: the model or the texts cannot be used, torch or onnx is missing, or there is too little memory.
        EdgeDuetError: a file cannot be written.
    """
    options = options or MakingOptions()
    _require_libraries()
    folder = model if isinstance(model, ModelFolder) else ModelFolder.open(model, root)
    refuse_taken(folder, options.name, replace=options.replace)
    _check_memory(folder, options)
    began = clock()
    work = work or Path(platformdirs.user_cache_dir("edgeduet")) / "drafters"
    texts_deadline = None if options.minutes is None else began + 60 * options.minutes * _READING_SHARE
    prompts = choose_prompts(corpus, languages, per_domain=options.per_domain)
    local = LocalModel.open(folder, threads=threads)
    store = TextStore.of(work, ModelBinding.of(folder), options.reading)
    texts = read_texts(
        local,
        encode_prompts(local.tokenizer, prompts, options.reading),
        store,
        options.reading,
        positions=options.positions,
        deadline=texts_deadline,
        clock=clock,
        progress=lambda done, total: progress("letting the model write", done, total),
    )
    if not texts:
        raise ModelError("there was no time to read a single text; give more --minutes")
    used, ends = local.vocabulary.used, local.manifest.eos_ids
    del local  # its memory
    vocabulary = choose_vocabulary(texts, min(options.vocabulary, used), used=used, always=ends)
    dataset = DrafterDataset(texts, target_tables(folder, vocabulary))
    learnt, held_out = dataset.split(_HELD_OUT, options.seed)
    read = clock()
    parameters, metrics = _trained(learnt, options, work, threads, began, clock, progress)
    facts = {
        "texts": "packages" if corpus is None and languages is None else str(corpus or ",".join(languages or ())),
        "domains": {domain: dataset.of_domain(domain).positions for domain in dataset.domains()},
        **metrics,
        "seconds_reading": round(read - began, 1),
        "seconds_training": round(clock() - read, 1),
    }
    return export(parameters, learnt, folder, options.name, training=facts, held_out=held_out, replace=options.replace)


def _trained(
    learnt: DrafterDataset,
    options: MakingOptions,
    work: Path,
    threads: int | None,
    began: float,
    clock: Callable[[], float],
    progress: ProgressCallback,
) -> tuple[Parameters, dict[str, Any]]:
    """Return trained parameters and what to note; goes on from a checkpoint of the same data and settings."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    config = DrafterConfig(
        hidden_width=learnt.tables.hidden_width,
        inner_width=options.inner_width,
        output_scale=learnt.hidden_scale(),
        steps=options.steps or max(1, _PASSES * learnt.positions // options.batch),
        batch=options.batch,
        learning_rate=options.learning_rate,
        seed=options.seed,
    )
    checkpoint = Checkpoint.of(work, learnt, config)
    state, steps = checkpoint.read()
    if options.minutes is not None:
        left = began + 60 * options.minutes - clock()
        config = config.model_copy(update={"steps": steps or _steps_that_fit(learnt, config, left, clock)})
    parameters, metrics = train(
        initial_parameters(config),
        learnt,
        config,
        state=state,
        save=lambda state: checkpoint.write(state, config.steps),
        clock=clock,
        progress=lambda done, total: progress("training the drafter", done, total),
    )
    checkpoint.remove()
    return parameters, {"config": config.model_dump(), **metrics}


def _steps_that_fit(learnt: DrafterDataset, config: DrafterConfig, seconds: float, clock: Callable[[], float]) -> int:
    """Return how many updates fit into ``seconds``, from the time of a few."""
    trial = config.model_copy(update={"steps": _TRIAL})
    train(initial_parameters(trial), learnt, trial.model_copy(update={"steps": 1}), clock=clock)
    began = clock()
    train(initial_parameters(trial), learnt, trial, clock=clock)
    each = (clock() - began) / _TRIAL
    return max(1, min(config.steps, int((seconds - (clock() - began)) / max(each, 1e-9))))


class Checkpoint:
    """Where a training is, on disk: one file, replaced whole.

    Args:
        path: the file; its name holds the key of data and settings.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, work: Path, learnt: DrafterDataset, config: DrafterConfig) -> Checkpoint:
        """Return the checkpoint of a training below ``work``; the number of updates is not part of its key."""
        digest = hashlib.sha256(json.dumps(config.model_dump(exclude={"steps"}), sort_keys=True).encode())
        digest.update(learnt.tables.vocabulary_N.tobytes())
        for text in learnt.texts:
            digest.update(text.tokens.tobytes())
            digest.update(text.hidden.tobytes())
        return cls(work / f"training-{digest.hexdigest()[:16]}.npz")

    def read(self) -> tuple[TrainingState | None, int | None]:
        """Return the state and the number of updates planned, or ``None`` twice where nothing usable is there."""
        try:
            with np.load(self.path) as stored:
                groups = {
                    group: {key.partition("/")[2]: stored[key] for key in stored.files if key.startswith(f"{group}/")}
                    for group in ("parameters", "first", "second")
                }
                state = TrainingState(**groups, step=int(stored["step"]), losses=tuple(stored["losses"].tolist()))
                return state, int(stored["steps"])
        except FileNotFoundError:
            return None, None
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{self.path} is damaged ({error}); remove it, and training begins anew") from error

    def write(self, state: TrainingState, steps: int) -> None:
        """Replace the file."""
        groups = {"parameters": state.parameters, "first": state.first, "second": state.second}
        arrays = {f"{group}/{key}": values for group, part in groups.items() for key, values in part.items()}
        with atomic_output(self.path) as temporary, temporary.open("wb") as file:
            np.savez(file, step=state.step, losses=np.array(state.losses), steps=steps, **arrays)  # type: ignore[arg-type]

    def remove(self) -> None:
        """Delete the file."""
        self.path.unlink(missing_ok=True)


def _require_libraries() -> None:
    import importlib.util

    missing = [name for name in ("torch", "onnx") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(
            f"training a drafter needs {' and '.join(missing)}: pip install 'edgeduet[train,export]'; "
            "or train it on another machine and copy the model folder"
        )


def _check_memory(folder: ModelFolder, options: MakingOptions) -> None:
    """Refuse what would not fit, before an hour of reading.

    Beside the model: every position twice (read, and laid out), 48 bytes of it a label; the head; parameters with
    gradients, moments and a copy; the logits of a batch, three deep, with gradients.
    """
    width = folder.manifest.hidden_width
    positions = options.positions * (2 * 2 * width + 48 * LABELS)
    network = 6 * 4 * (2 * width * (width + 2 * options.inner_width) + options.inner_width * width)
    tables = 4 * width * (2 * options.vocabulary + min(options.positions, folder.manifest.vocab_size))
    batch = 3 * 4 * 4 * options.batch * options.vocabulary
    needed = positions + network + tables + batch
    limit = available_memory() - folder.memory_bytes(0)
    if options.memory_mb is not None:
        limit = min(limit, 1_000_000 * options.memory_mb)
    if needed > limit:
        raise ModelError(
            f"training on {options.positions:,} tokens needs about {needed / 1e6:,.0f} MB of memory beside the model, "
            f"and {limit / 1e6:,.0f} MB may be used; give fewer --tokens, or a smaller --vocabulary"
        )
