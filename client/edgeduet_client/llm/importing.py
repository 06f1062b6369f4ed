"""Turn a source into a model folder: weights, tokenizer, families, checks, manifest.

The order is chosen so that what is likely to fail fails first and cheaply: the architecture, the
tokenizer and the memory needed are settled before a graph is written.
"""

from __future__ import annotations

import gc
import importlib.metadata
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgeduet_client.llm.architecture import Architecture
from edgeduet_client.llm.block_matrix import row_norms
from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.families import family_table
from edgeduet_client.llm.free_memory import available_memory
from edgeduet_client.llm.graph import GRAPH_FILE, WEIGHTS_FILE, build_graph
from edgeduet_client.llm.import_checks import (
    PROMPTS,
    GreedyText,
    check_greedy_identity,
    check_perplexity,
    check_ratio,
    check_text,
    generate_greedily,
    perplexity,
    torch_logits,
)
from edgeduet_client.llm.model_folder import (
    FAMILIES,
    GRAPH,
    HEAD_NORMS,
    TOKENIZER,
    ModelFolder,
    file_sha256,
    models_root,
    new_folder,
    write_manifest,
)
from edgeduet_client.llm.quantisation import DTYPES, Quantisation, QuantisedWeights, has_own_four_bits
from edgeduet_client.llm.session import TargetSession
from edgeduet_client.llm.smoothing import Ranges, SmoothedWeights, calibration_texts, input_ranges
from edgeduet_client.llm.sources import Progress, Source, SpecialTokens, open_source, require
from edgeduet_client.llm.tokenizer import Tokenizer

LONGEST_DEFAULT_CONTEXT = 8192
# Room for the prompts of the greedy comparison and the tokens after them.
SHORTEST_CONTEXT = 64
_PERPLEXITY_CONTEXT = 1024
_LIBRARY_MEMORY = 1 << 30
_MEMORY_REMEDY = "close other programs, or import on a larger machine and copy the model folder"
_LIBRARIES = ("edgeduet", "onnx", "onnxruntime", "tokenizers", "transformers", "gguf")


@dataclass(frozen=True)
class ImportOptions:
    """What can be chosen about an import.

    Attributes:
        quantisation: ``None``: ``int4`` for a 4-bit GGUF file, whose blocks are taken over, otherwise ``int8``.
        context_length: positions to support; ``None``: the model's own, at most 8192.
        largest_ratio: refuse a quantisation that multiplies perplexity by more; ``None``: 1.02 for int8, 1.05
            for w8a8, 1.10 for int4.
        compare_with_source: run the source model with torch and compare; the manifest says when it was not done.
    """

    name: str | None = None
    quantisation: Quantisation | None = None
    context_length: int | None = None
    largest_ratio: float | None = None
    compare_with_source: bool = True
    replace: bool = False


def import_model(
    source: str,
    options: ImportOptions,
    *,
    root: Path | None = None,
    progress: Progress = lambda what, done, total: None,
) -> ModelFolder:
    """Import a model (see :func:`edgeduet_client.llm.sources.open_source` for what ``source`` may be).

    Raises:
        ModelError: an unknown source or architecture, tokenizer and weights that do not match, too little
            memory, a graph that differs from its source, a quantisation that costs too much.
        EdgeDuetError: the disk is full or not writable. In every case no model folder appears.
    """
    root = root or models_root()
    require("onnx")
    name = options.name or default_name(source)
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", name):
        raise ModelError(f"'{name}' is no model name; use --name with small letters, digits, '.', '_' and '-'")
    try:
        with new_folder(name, root, replace=options.replace) as folder:
            scratch = folder / "scratch"
            scratch.mkdir()
            opened = open_source(source, scratch)
            _Import(opened, options, folder, scratch, progress).run(name)
    except MemoryError as error:
        raise ModelError(f"importing {source} needs more memory than there is; {_MEMORY_REMEDY}") from error
    return ModelFolder.open(root / name)


class _Import:
    """One import at work in an unpublished folder."""

    def __init__(self, source: Source, options: ImportOptions, folder: Path, scratch: Path, progress: Progress) -> None:
        self.source, self.options, self.folder, self.scratch = source, options, folder, scratch
        self.progress = progress
        native = source.architecture
        wanted = options.context_length or min(native.context_length, LONGEST_DEFAULT_CONTEXT)
        if not SHORTEST_CONTEXT <= wanted <= native.context_length:
            raise ModelError(
                f"a context of {wanted} tokens is not possible: the model was trained for {native.context_length}; "
                f"choose --context between {SHORTEST_CONTEXT} and {native.context_length}"
            )
        self.native_context = native.context_length
        self.architecture = native.with_context(wanted)
        own: Quantisation = "int4" if has_own_four_bits(source.kinds) else "int8"
        self.quantisation: Quantisation = options.quantisation or own
        self.keep_blocks = self.quantisation == own

    def run(self, name: str) -> None:
        _check_room(self.source, self.architecture, self.options, self.folder)
        source_sha256 = self.source.checksum()
        tokens, tokenizer = self._tokenizer()
        weights, checks = self._graphs(tokens, tokenizer)
        matrix = weights.matrix("embedding" if self.architecture.tied_head else "head")
        np.save(self.folder / HEAD_NORMS, row_norms(matrix))
        family_table(self.folder / TOKENIZER, self.architecture.vocab_width, cache=self.folder / FAMILIES)
        shutil.rmtree(self.scratch)
        self.progress("checksums", 0, 1)
        facts = self._facts(tokens, tokenizer, weights)
        write_manifest(self.folder, {"name": name, "source_sha256": source_sha256, **facts, "checks": checks})
        self.progress("checksums", 1, 1)

    def _tokenizer(self) -> tuple[SpecialTokens, Tokenizer]:
        self.progress("tokenizer", 0, 1)
        tokens = self.source.write_tokenizer(self.folder)
        tokenizer = Tokenizer(self.folder / TOKENIZER)
        width = self.architecture.vocab_width
        if tokenizer.vocab_size > width:
            raise ModelError(
                f"{self.source.label}: the tokenizer knows {tokenizer.vocab_size} tokens, the model only {width}; "
                "tokenizer and weights belong to different models"
            )
        if not tokens.eos_ids:
            raise ModelError(f"{self.source.label}: no end-of-text token is stated; fetch generation_config.json too")
        named = [*tokens.eos_ids, *(token for token in (tokens.bos_id, tokens.pad_id) if token is not None)]
        if not all(0 <= token < width for token in named):
            raise ModelError(
                f"{self.source.label}: special tokens {named} lie outside the model's {width}; "
                "tokenizer and weights belong to different models"
            )
        self.progress("tokenizer", 1, 1)
        return tokens, tokenizer

    def _graphs(self, tokens: SpecialTokens, tokenizer: Tokenizer) -> tuple[QuantisedWeights, dict[str, Any]]:
        """Write the float32 graph, compare it with the source, write the quantised one, compare the two."""
        beginning = [tokens.bos_id] if tokens.add_bos and tokens.bos_id is not None else []
        text = [*beginning, *tokenizer.encode(check_text())][
            : min(_PERPLEXITY_CONTEXT, self.architecture.context_length)
        ]
        prompts = [[*beginning, *tokenizer.encode(prompt)] for prompt in PROMPTS]
        quantised = self.quantisation != "none"
        place = self.scratch if quantised else self.folder
        plain = self._write("none", place)
        self._refuse_leftovers()
        if quantised:
            del plain  # its tables in float32, before torch needs the memory
        ranges = self._ranges(place, beginning, tokenizer) if self.quantisation == "w8a8" else None
        session = self._session(place)
        compare = self.options.compare_with_source
        texts = [generate_greedily(session, prompt) for prompt in prompts] if compare else []
        reference = self._perplexity(session, text, "perplexity, float32")
        del session  # its memory, before torch needs it
        gc.collect()
        check_perplexity(reference, self.architecture.vocab_width)
        checks: dict[str, Any] = {"compared_with_source": compare}
        checks |= {"perplexity_tokens": len(text), "perplexity_fp32": reference}
        if compare:
            checks["greedy"] = self._compare(texts)
        if not quantised:
            return plain, checks
        _empty(self.scratch)
        weights = self._write(self.quantisation, self.folder, ranges)
        value = self._perplexity(self._session(self.folder), text, f"perplexity, {self.quantisation}")
        checks |= {"perplexity": value, "perplexity_ratio": value / reference}
        check_ratio(self.quantisation, value / reference, self.options.largest_ratio)
        return weights, checks

    def _refuse_leftovers(self) -> None:
        """Refuse weights that hold more than the graph used: the graph would be another model."""
        unused = self.source.weights.unused()
        if unused:
            raise ModelError(
                f"{self.source.label}: a {self.architecture.family} model has no {unused[0]}"
                f"{f' (and {len(unused) - 1} more tensors)' if len(unused) > 1 else ''}; "
                "this variant of the architecture is not supported"
            )

    def _ranges(self, place: Path, beginning: Sequence[int], tokenizer: Tokenizer) -> Ranges:
        """Read how large the activations of the float32 graph get."""
        self.progress("ranges of activations", 0, 1)
        texts = calibration_texts(tokenizer, beginning, self.architecture.context_length)
        ranges = input_ranges(place / GRAPH, texts)
        self.progress("ranges of activations", 1, 1)
        return ranges

    def _write(self, quantisation: Quantisation, place: Path, ranges: Ranges | None = None) -> QuantisedWeights:
        source: Any = self.source.weights
        if ranges is not None:
            head = "embedding" if self.architecture.tied_head else "head"
            source = SmoothedWeights(source, ranges, head=head, unit_offset=self.architecture.unit_offset_norms)
        weights = QuantisedWeights(source, quantisation, keep_blocks=self.keep_blocks)
        what = f"graph, {DTYPES[quantisation]}"
        build_graph(self.architecture, weights, place, lambda done, total: self.progress(what, done, total))
        return weights

    def _session(self, place: Path) -> TargetSession:
        return TargetSession(place / GRAPH, context_length=self.architecture.context_length)

    def _compare(self, texts: Sequence[GreedyText]) -> dict[str, Any]:
        what = "comparison with the source"
        self.progress(what, 0, len(texts))
        source = torch_logits(self.source.torch_model())
        return asdict(check_greedy_identity(texts, source, lambda done, total: self.progress(what, done, total)))

    def _perplexity(self, session: TargetSession, text: Sequence[int], what: str) -> float:
        return perplexity(session, text, lambda done, total: self.progress(what, done, total))

    def _facts(self, tokens: SpecialTokens, tokenizer: Tokenizer, weights: QuantisedWeights) -> dict[str, Any]:
        arch = self.architecture
        return {
            "source": self.source.label,
            "licence": self.source.licence(),
            "architecture": arch.family,
            "layers": arch.layers,
            "hidden_width": arch.hidden_width,
            "query_heads": arch.query_heads,
            "kv_heads": arch.kv_heads,
            "head_dim": arch.head_dim,
            "context_length": arch.context_length,
            "native_context_length": self.native_context,
            "vocab_width": arch.vocab_width,
            "vocab_size": tokenizer.vocab_size,
            "tokenizer_sha256": file_sha256(self.folder / TOKENIZER),
            **asdict(tokens),
            "dtype": DTYPES[self.quantisation],
            "bits_per_weight": round(weights.bits_per_weight, 3),
            "memory_weights": (self.folder / WEIGHTS_FILE).stat().st_size,
            "memory_kv_per_token": 4 * arch.kv_numbers_per_token,
            "versions": _versions(),
        }


def _check_room(source: Source, arch: Architecture, options: ImportOptions, folder: Path) -> None:
    """Refuse an import that would not fit, before it fills the machine.

    Memory beside the libraries': two float32 copies of the weights (the session's own, and what is being read);
    with the source in torch four, since a GGUF file is dequantised there (measured with Gemma 3 270M: 5.8 GB in
    all, of which 1.3 GB are pages of files). Disk: one float32 copy; the quantised graph is written after that one
    is gone, and is smaller.

    Raises:
        ModelError: says what is needed and what there is.
    """
    one = 4 * arch.parameters
    needed, available = _LIBRARY_MEMORY + one * (4 if options.compare_with_source else 2), available_memory()
    if needed > available:
        remedy = _MEMORY_REMEDY
        if options.compare_with_source:
            remedy += ", or leave the comparison out with --no-source-check (half as much)"
        raise ModelError(
            f"importing {source.label} needs about {needed / 2**30:.1f} GiB of memory and {available / 2**30:.1f} GiB "
            f"are free; {remedy}"
        )
    free = shutil.disk_usage(folder).free
    if one > free:
        raise ModelError(
            f"importing {source.label} needs about {one / 2**30:.1f} GiB on the disk of {folder.parent} and "
            f"{free / 2**30:.1f} GiB are free; free some space, or set EDGEDUET_MODELS or --models to another folder"
        )


def default_name(source: str) -> str:
    """Return the name that a source suggests: of its file, folder or repository, in small letters."""
    path = Path(source).expanduser()
    stem = (path.resolve() if path.exists() else path).name.lower().removesuffix(".gguf")
    return re.sub(r"[^a-z0-9._-]+", "-", stem).strip("-._")[:64] or "model"


def _versions() -> dict[str, str]:
    versions = {}
    for library in _LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[library] = importlib.metadata.version(library)
    return versions


def _empty(folder: Path) -> None:
    """Remove the graph that was compared; what a source put beside it stays."""
    for name in (GRAPH_FILE, WEIGHTS_FILE):
        (folder / name).unlink()
