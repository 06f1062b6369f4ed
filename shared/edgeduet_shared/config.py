"""Typed configuration: what a scenario is and what a method may set.

A *scenario* is everything that makes runs comparable (data, partition, stream, backbone, clients,
rounds, model sizes); a *method* adds only its own options. Both come from TOML; every field is
documented and bounded here, and ``edgeduet-sim describe`` prints exactly these descriptions.
Unknown keys are errors that name the nearest known key.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from edgeduet_shared.errors import ConfigError, nearest


class Section(BaseModel):
    """Base of all sections: immutable, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DataConfig(Section):
    """Where images come from."""

    source: str = Field(
        "world",
        description="'world' (generated, always works), 'folder:PATH' (root/[domain/]class/*.jpg), "
        "'torchvision:NAME:ROOT' (already on disk), 'hub:NAME' (Hugging Face data set), or 'device': every client its "
        "own images ('device:ROOT' in a simulation: client c has the c-th folder of ROOT)",
    )
    test_fraction: float = Field(0.3, gt=0, lt=1, description="share of each (domain, class) kept for testing")
    max_per_class: int = Field(0, ge=0, description="at most this many images per (domain, class); 0 = all")
    skip_corrupt: bool = Field(False, description="leave out unreadable images (counted) instead of stopping")
    domains: tuple[str, ...] = Field((), description="use only these domains, in this order; empty = all, sorted")
    classes: tuple[str, ...] = Field((), description="use only these classes; empty = all, sorted")

    @property
    def on_devices(self) -> bool:
        """Whether every client has images of its own, which nobody else sees."""
        return self.source.partition(":")[0] == "device"

    @model_validator(mode="after")
    def _classes_are_said(self) -> DataConfig:
        if self.on_devices and not self.classes:
            raise ValueError("source = 'device' needs classes: no one sees all images, so the scenario names them")
        return self


class StreamConfig(Section):
    """The ordered tasks."""

    kind: Literal["class-incremental", "domain-incremental"] = Field(
        "domain-incremental", description="new classes in each task, or the same classes in a new domain"
    )
    classes_per_task: int = Field(2, ge=1, description="classes per task (class-incremental only)")
    order: Literal["given", "seeded"] = Field("given", description="task order as given or shuffled by the seed")
    held_out_classes: int = Field(
        0, ge=0, description="classes kept out of the stream to measure zero-shot retention (seeded choice)"
    )


class PartitionConfig(Section):
    """Which client holds which training images."""

    kind: Literal["iid", "dirichlet", "domain", "pathological"] = Field("iid", description="partitioner")
    beta: float = Field(0.5, gt=0, description="Dirichlet concentration; smaller is more skewed")
    min_size: int = Field(1, ge=0, description="smallest number of training images per client and task")
    classes_per_client: int = Field(2, ge=1, description="classes each client holds (pathological only)")


class AdapterConfig(Section):
    """Adapters inside or behind the frozen towers (fed-duet.md 1.4)."""

    placement: Literal["embedding", "stages", "blocks"] = Field(
        "embedding",
        description="image side: on the image embedding (cheapest), after conv stages, or in every ViT block",
    )
    image_layers: tuple[int, ...] = Field(
        (), description="stages or blocks that get an adapter; empty = the last two stages, or all blocks"
    )
    text_layers: tuple[int, ...] | None = Field(
        None, description="text blocks that get an adapter; empty list = none; unset = all blocks"
    )
    bottleneck: int = Field(32, ge=1, description="width of each routed adapter")
    shared_bottleneck: int = Field(64, ge=1, description="width of the always-on shared adapter")
    experts: int = Field(4, ge=0, description="routed (private) adapters per site; 0 = shared adapter only")
    top_k: int = Field(2, ge=1, description="routed adapters used per sample")
    scale: float = Field(0.3, gt=0, description="output scale of an adapter")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout inside adapters while training")


class PromptConfig(Section):
    """Learnable text context (fed-duet.md 1.2)."""

    length: int = Field(4, ge=0, description="learnable context vectors of the local prompt")
    template: str = Field("a photo of a {}.", description="hand-written template of the zero-shot reference")


class PoolConfig(Section):
    """The server's semantic prompt pool and its orchestrator (fed-duet.md 1.3)."""

    size: int = Field(64, ge=1, description="prompts in the server's pool (K)")
    dispatched: int = Field(8, ge=1, description="prompts sent to a client per round (m)")


class FusionConfig(Section):
    """Cross-attention fusion (fed-duet.md 1.6)."""

    stride: int = Field(4, ge=1, description="keep every n-th coordinate of the joint space")
    heads: int = Field(8, ge=1, description="attention heads")
    mix: float = Field(0.5, ge=0, le=1, description="lambda: weight of the local logits")


class ModelConfig(Section):
    """Frozen backbone and what is trained on it."""

    backbone: str = Field("clip-world", description="offline backbone, folder, or open_clip MODEL/PRETRAINED")
    adapter: AdapterConfig = AdapterConfig()
    prompt: PromptConfig = PromptConfig()
    pool: PoolConfig = PoolConfig()
    fusion: FusionConfig = FusionConfig()
    lora_rank: int = Field(8, ge=1, description="rank of LoRA updates (method fedavg-lora)")


class TrainConfig(Section):
    """Local optimisation (fed-duet.md 2.2)."""

    lr: float = Field(1e-3, gt=0, description="AdamW learning rate of adapters, LoRA and heads")
    prompt_lr: float = Field(2e-3, gt=0, description="AdamW learning rate of prompt contexts and fusion")
    weight_decay: float = Field(0.01, ge=0, description="AdamW weight decay")
    batch_size: int = Field(32, ge=1, description="images per step; the last short batch is kept")
    local_epochs: int = Field(1, ge=1, description="passes over the client's task data per round")
    max_steps: int = Field(0, ge=0, description="at most this many steps per round; 0 = no limit")
    clip_norm: float = Field(1.0, gt=0, description="gradient norm limit")
    warmup: float = Field(0.1, ge=0, le=1, description="share of a round's steps spent warming up; then cosine")


class FederationConfig(Section):
    """Clients and rounds."""

    clients: int = Field(5, ge=1, description="number of clients")
    rounds: int = Field(6, ge=1, description="rounds per stage")
    participation: float = Field(1.0, gt=0, le=1, description="share of clients asked per round")
    quorum: float = Field(0.5, gt=0, le=1, description="share of asked clients whose replies make a round count")
    node_wait: float = Field(60.0, ge=0, description="seconds to wait for enough clients to be online")
    round_timeout: float = Field(600.0, gt=0, description="seconds to wait for replies of one round")
    evaluate_common: bool = Field(
        True, description="also evaluate every personal model on the common test sets (costly with very many clients)"
    )
    max_bad_rounds: int = Field(3, ge=1, description="stop after this many skipped rounds in a row")


class PrivacyConfig(Section):
    """Optional differential privacy; off by default."""

    digest_clip: float = Field(1.0, gt=0, description="L2 clipping norm of a digest")
    digest_noise: float = Field(0.0, ge=0, description="noise multiplier on digests; 0 = off")
    update_clip: float = Field(0.0, ge=0, description="L2 clipping norm of a client's update; 0 = off")
    update_noise: float = Field(0.0, ge=0, description="noise multiplier on updates; needs update_clip")
    delta: float = Field(1e-5, gt=0, lt=1, description="delta at which epsilon is reported")
    noise_seed: Literal["secret", "run"] = Field(
        "secret",
        description="'secret': noise from the system's entropy; 'run': from the run's seed, which the server knows, so "
        "that numbers repeat but nothing is protected (experiments only)",
    )

    @model_validator(mode="after")
    def _noise_needs_clip(self) -> PrivacyConfig:
        if self.update_noise > 0 and self.update_clip == 0:
            raise ValueError("update_noise needs update_clip > 0: unclipped updates have no bounded sensitivity")
        return self


class DrafterConfig(Section):
    """Where clients train drafters of a language model instead of a classifier (docs/federated-drafters.md)."""

    target: str = Field(
        "", description="language model whose drafters are trained, name or folder; empty = clients train a classifier"
    )
    domains: tuple[str, ...] = Field(
        (),
        description="NAME=SOURCE each (docs/federated-drafters.md); client c holds texts of domain c % (their number)",
    )
    share_experts: bool = Field(
        False, description="hand every client's own drafter to all others; false = only the average leaves the server"
    )
    train_tokens: int = Field(20_000, ge=8, description="tokens of text a client trains on")
    test_prompts: int = Field(8, ge=1, description="held-out texts per domain which the target goes on from")
    prompt_tokens: int = Field(32, ge=1, description="tokens of such a text that are given")
    answer_tokens: int = Field(64, ge=8, description="tokens the target adds, greedily; drafters are judged on them")
    kind: str = Field("recurrent", description="kind of drafter")
    depth: int = Field(3, ge=1, le=16, description="longest draft")
    width: int = Field(128, ge=1, description="inner width of a drafter")
    vocabulary: int = Field(
        8192,
        ge=1,
        description="tokens a drafter may propose: the first ids, in byte-pair vocabularies the most frequent; the "
        "same for all clients, whatever they hold",
    )
    given_tokens: int = Field(96, ge=1, description="tokens of a training text that are given")
    written_tokens: int = Field(64, ge=1, description="tokens of a training text that the target adds")
    draft_cost: float = Field(0.05, ge=0, description="time of one drafted token / time of a plain step of the target")
    verify_cost: float = Field(0.1, ge=0, description="time of each further row of a step / time of a plain step")

    @field_validator("domains")
    @classmethod
    def _named(cls, domains: tuple[str, ...]) -> tuple[str, ...]:
        names = [domain.partition("=")[0] for domain in domains]
        for domain, name in zip(domains, names, strict=True):
            if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name) or not domain.partition("=")[2]:
                raise ValueError(f"'{domain}': expected NAME=SOURCE, the name in small letters, digits and '-'")
            if names.count(name) > 1:
                raise ValueError(f"domain '{name}' is there twice")
        return domains

    @model_validator(mode="after")
    def _target_needs_domains(self) -> DrafterConfig:
        if bool(self.target) != bool(self.domains):
            raise ValueError("target and domains go together: give both, or neither")
        return self

    def domain(self, client: int) -> str:
        """Return the name of the domain whose texts ``client`` holds."""
        return self.domain_names[client % len(self.domains)]

    def source(self, client: int) -> str:
        """Return where the texts of ``client``'s domain come from."""
        return self.domains[client % len(self.domains)].partition("=")[2]

    @property
    def domain_names(self) -> tuple[str, ...]:
        """Names of the domains, in order."""
        return tuple(domain.partition("=")[0] for domain in self.domains)


class Scenario(Section):
    """Everything that makes runs comparable, except the method and the seed.

    A scenario with a ``drafter.target`` trains drafters; what it says of images and backbones is not used, and the
    section ``drafter`` of any other scenario is left out where a scenario is written down.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", description="scenario name")
    purpose: str = Field("", description="one line: what this scenario is for")
    data: DataConfig = DataConfig()
    stream: StreamConfig = StreamConfig()
    partition: PartitionConfig = PartitionConfig()
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    federation: FederationConfig = FederationConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    drafter: DrafterConfig = DrafterConfig()

    @model_validator(mode="after")
    def _images_stay_where_they_are(self) -> Scenario:
        if self.data.on_devices and self.partition != PartitionConfig():
            raise ValueError(
                "with data.source = 'device' every client trains on what it has, so nothing is dealt out: leave "
                "[partition] out"
            )
        if self.data.on_devices and self.stream.kind == "domain-incremental" and len(self.data.domains) < 2:
            raise ValueError(
                "data.source = 'device' with stream.kind = 'domain-incremental' needs two or more data.domains, the "
                "names of the devices' domain folders; or take stream.kind = 'class-incremental'"
            )
        return self

    @property
    def learns(self) -> Literal["classifier", "drafter"]:
        """What clients train."""
        return "drafter" if self.drafter.target else "classifier"

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = write(self)
        if not self.drafter.target:
            values.pop("drafter", None)
        return values

    def digest(self) -> str:
        """16 hex digits that identify the resolved scenario."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]


SectionT = TypeVar("SectionT", bound=BaseModel)


def parse(model: type[SectionT], values: Mapping[str, Any], where: str) -> SectionT:
    """Validate ``values`` as ``model``; every problem becomes one :class:`ConfigError` line."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_one_line(error, model, where)) from error


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; raise :class:`ConfigError` naming the file when it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML ({error})") from error


def load_scenario(path: Path, overrides: Sequence[str] = ()) -> Scenario:
    """Read a scenario file and apply ``key=value`` overrides (``train.lr=0.01``)."""
    values = apply_overrides(read_toml(path), overrides, Scenario)
    return parse(Scenario, values, str(path))


def apply_overrides(values: dict[str, Any], overrides: Sequence[str], model: type[BaseModel]) -> dict[str, Any]:
    """Return ``values`` with each dotted ``key=value`` set; values are parsed as TOML, else kept as text."""
    result: dict[str, Any] = json.loads(json.dumps(values))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {override}: expected key=value, for example --set train.lr=0.01")
        _check_key(key, model, f"--set {override}")
        node = result
        *parents, leaf = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = _toml_value(text)
    return result


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def _check_key(key: str, model: type[BaseModel], where: str) -> None:
    current: Any = model
    for part in key.split("."):
        fields = getattr(current, "model_fields", None)
        if fields is None or part not in fields:
            known = list(known_keys(model))
            raise ConfigError(f"{where}: unknown key '{key}'{nearest(key, known)}")
        current = fields[part].annotation


def known_keys(model: type[BaseModel], prefix: str = "") -> dict[str, str]:
    """Dotted key -> description of every leaf setting of ``model``."""
    keys: dict[str, str] = {}
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            keys.update(known_keys(kind, f"{prefix}{name}."))
        else:
            keys[prefix + name] = field.description or ""
    return keys


def _one_line(error: ValidationError, model: type[BaseModel], where: str) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"]) or model.__name__
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        return f"{where}: unknown key '{key}'{nearest(key, known_keys(model))}{more}"
    what = first["msg"].removeprefix("Value error, ")
    if isinstance(first.get("input"), Mapping):
        # About a section as a whole: what was in it would hide what is wrong.
        return f"{where}: {key + ': ' if first['loc'] else ''}{what}{more}"
    return f"{where}: {key}: {what} (got {first.get('input')!r}){more}"
