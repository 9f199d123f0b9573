"""Every knob of a run, once.

A run is one TOML file, read into frozen models that refuse unknown keys. The docstring under each
field is its documentation everywhere: in the README's table and in Prefect's run form.
Sizes that follow from others (padding, cache width, cores per worker) are derived, not configured.
"""

import difflib
import tomllib
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)


class ConfigError(ValueError):
    """The run was described wrongly. The message says what, where, and what to do."""


class Section(BaseModel):
    """A table of the configuration file: frozen, and a stranger to unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True
    )


class StudentConfig(Section):
    """The model that learns."""

    model: str
    """Hugging Face folder or hub id of the causal language model to train."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of activations and published weights; `auto` is bfloat16 on a GPU, float32 on a CPU.
    Master weights are float32 always."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model's files. Only for authors you trust."""


class TeacherConfig(Section):
    """The model that is imitated."""

    model: str
    """Hugging Face folder or hub id; must share the student's tokenizer."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the teacher's activations; `auto` as for the student."""
    temperature: float = Field(1.0, gt=0)
    """Divides the teacher's logits before the softmax. Below 1 the target is sharper."""
    trust_remote_code: bool = False
    """As for the student."""


class PromptsConfig(Section):
    """Where prompts come from, and how they become token ids."""

    path: str | list[str]
    """JSONL or Parquet at any fsspec URL, or several of them. A row has `text` or `messages`, and
    optionally `id`, `answer` and `verifier` (`boxed`, `exact`, `number`)."""
    growing: bool = False
    """The files are being written to: a last line without its end is left for the next run."""
    max_tokens: int = Field(512, gt=0)
    """Longest prompt in tokens, chat template included."""
    too_long: Literal["refuse", "skip"] = "refuse"
    """A longer prompt ends the run before it starts, or is left out and counted."""
    template: dict[str, bool | int | float | str] = {}
    """Arguments of the tokenizer's chat template, for example `enable_thinking = false`."""

    @property
    def sources(self) -> list[str]:
        return [self.path] if isinstance(self.path, str) else self.path


class EvaluationConfig(Section):
    """The fixed, held-out prompts on which models are compared."""

    path: str
    """As `prompts.path`. Its prompts are left out of training."""
    limit: int = Field(256, gt=0)
    """At most this many prompts, from the top of the file."""


class RolloutConfig(Section):
    """Generation by the student."""

    backend: Literal["vllm", "hf"] = "vllm"
    """`vllm` is fast; `hf` is plain transformers, the reference, and runs anywhere."""
    workers: int = Field(1, gt=0)
    """Rollout workers, each with its own copy of the student."""
    max_new_tokens: int = Field(512, gt=0)
    """Longest response. A response cut here has finish reason `length` and trains all the same."""
    temperature: float = Field(1.0, gt=0)
    """Divides the student's logits, in sampling and in the loss alike: both see one
    distribution."""
    slots: int = Field(128, gt=0)
    """Responses that one worker generates at the same time. More is faster per token, and older."""
    memory_gib: float = Field(1.0, gt=0)
    """Memory of the key-value cache of one vLLM worker, in GiB, CPU or GPU."""
    swap: Literal["keep", "reprefill"] = "keep"
    """At new weights, responses in flight go on with the keys and values of the old ones, or have
    them computed again. The recorded log-probabilities are of what was sampled from, either way."""


class ScoringConfig(Section):
    """Scoring by the teacher."""

    workers: int = Field(1, gt=0)
    """Teacher workers, each with its own copy of the teacher."""
    token_budget: int = Field(8192, gt=0)
    """Padded tokens in one forward pass; also the size at which waiting rollouts are sent."""
    flush_seconds: float = Field(0.1, ge=0)
    """Longest time a finished rollout waits for company before it is scored alone."""
    concurrent: int = Field(2, gt=0)
    """Requests that one worker has at the same time: the next is on its way while one is scored."""


class Sampled(Section):
    """Cache the emitted token alone: unbiased with its importance ratio, and noisy."""

    type: Literal["sampled"] = "sampled"


class MultiSample(Section):
    """Cache n draws from the student, the emitted token among them: unbiased, less noisy."""

    type: Literal["multi_sample"] = "multi_sample"
    n: int = Field(64, gt=0, lt=2**16)
    """Draws per token, with replacement; stored as (id, count)."""
    distinct: bool = False
    """Weigh each distinct id by the inverse of its probability to be among the draws, rather than
    by how often it came up: the same cache, less noise."""


class StudentTopK(Section):
    """Cache the student's k likeliest ids. Biased: ids that the sampler ranked low are never seen,
    or only as one bucket. For comparison."""

    type: Literal["student_top_k"] = "student_top_k"
    k: int = Field(16, gt=0)
    """Ids per token."""
    rest: Literal["bucket", "renormalise"] = "bucket"
    """All other ids are one bucket, or both distributions are renormalised over the k."""

    @model_validator(mode="after")
    def _one_id_needs_its_rest(self) -> "StudentTopK":
        if self.k == 1 and self.rest == "renormalise":
            raise ValueError(
                'k = 1 with rest = "renormalise" compares two distributions over one id, which are '
                'always equal: there is nothing to learn; raise k, or set rest = "bucket"'
            )
        return self


class Poisson(Section):
    """Cache each id a with probability min(1, (n p(a))^alpha): unbiased, little noise."""

    type: Literal["poisson"] = "poisson"
    n: int = Field(256, gt=0)
    """Ids likelier than 1/n are always kept. More costs bytes and cuts variance."""
    alpha: float = Field(0.75, gt=0, le=1)
    """Below 1, rare ids are kept more often than in proportion: robust when rollouts are stale."""
    max_ratio: float = Field(2.0, ge=0, allow_inf_nan=False)
    """Cap on p/inclusion probability, 0 for none. Fresh ids never reach 1; of stale ones it costs a
    little bias, and without it a single id that has become likely can drown an update."""
    top_k: int = Field(0, ge=0)
    """So many of the likeliest ids are kept for certain."""


class TopKTail(Section):
    """Cache the student's k likeliest ids and, where the emitted token is not one of them, that
    token for all the rest: unbiased; the rest is noisy."""

    type: Literal["top_k_tail"] = "top_k_tail"
    k: int = Field(16, gt=0)
    """Ids per token."""
    n: int | None = Field(None, gt=0)
    """Thin the k ids as `poisson` does with this n; keep all of them if unset. Of a distribution of
    which only the top is known, this is the smallest unbiased cache."""
    alpha: float = Field(0.75, gt=0, le=1)
    """As for `poisson`, where n is set."""


class Dense(Section):
    """The teacher's whole vocabulary: exact, the oracle. For small vocabularies."""

    type: Literal["dense"] = "dense"


class TeacherHidden(Section):
    """The teacher's last hidden state, of which the learner, who holds the teacher's head, makes
    the whole distribution: exact at any age, with nothing to choose. 2 bytes a dimension, which is
    for workers near each other; take `poisson` where links are narrow."""

    type: Literal["teacher_hidden"] = "teacher_hidden"


class TeacherTopK(Section):
    """The teacher's k likeliest ids and a bucket for the rest."""

    type: Literal["teacher_top_k"] = "teacher_top_k"
    k: int = Field(16, gt=0)
    """Ids per token. The rest of the vocabulary is one bucket, so that the loss stays >= 0."""


class TeacherMultiSample(Section):
    """Cache n draws from the teacher: unbiased for the forward KL, and needs no ratio."""

    type: Literal["teacher_multi_sample"] = "teacher_multi_sample"
    n: int = Field(64, gt=0, lt=2**16)
    """Draws per token, with replacement; stored as (id, count)."""


class Unclipped(Section):
    """No clip: with learner signal and ratio, the exact gradient at fixed prefixes."""

    type: Literal["none"] = "none"
    signal: Literal["learner", "rollout"] = "learner"
    """log q - log p under the present learner, or frozen as log q - log p_old when the token was
    sampled. Frozen and unclipped it pulls towards a point mass, and collapses."""
    ratio: bool = True
    """Weigh by p/p_old. Without it, stale tokens count as if the learner had sampled them."""


class Clipped(Section):
    """PPO's clip: no gradient from an id whose ratio has already moved by eps in the direction that
    its signal asks for."""

    type: Literal["clip"] = "clip"
    signal: Literal["learner", "rollout"] = "learner"
    """As without a clip."""
    eps: float = Field(0.2, gt=0, lt=1)
    """The ratio is held within 1 - eps and 1 + eps."""


class Decoupled(Section):
    """AReaL's decoupled clip: the ratio is taken to the policy at the step's start, and what that
    policy has moved from the sampler is a constant weight."""

    type: Literal["decoupled"] = "decoupled"
    signal: Literal["learner", "rollout"] = "learner"
    """As without a clip."""
    eps: float = Field(0.2, gt=0, lt=1)
    """As for `clip`."""
    cap: float = Field(5.0, gt=1)
    """An id with a larger constant weight is left out."""


class M2PO(Section):
    """M2PO's clip: its bounds are the widest under which the second moment of the log ratio, over
    the step's ids that move in the harmful direction, stays within a budget."""

    type: Literal["m2po"] = "m2po"
    signal: Literal["learner", "rollout"] = "learner"
    """As without a clip."""
    budget: float = Field(0.01, gt=0)
    """Largest mean of the squared log ratio."""


Stabiliser = Annotated[Unclipped | Clipped | Decoupled | M2PO, Field(discriminator="type")]


class ReverseKL(Section):
    """KL(student || teacher): the student learns what it would say itself."""

    type: Literal["reverse_kl"] = "reverse_kl"
    cache: Annotated[
        Sampled | MultiSample | StudentTopK | Poisson | TopKTail | TeacherHidden | Dense,
        Field(discriminator="type"),
    ] = TeacherHidden()
    """What is cached of the two distributions at each token."""
    stabiliser: Stabiliser = Unclipped()
    """What is done against stale rollouts, beyond the importance ratio. Other than the default, for
    comparison."""

    @model_validator(mode="after")
    def _stabilises_a_ratio(self) -> "ReverseKL":
        summed = isinstance(self.cache, Dense | TeacherHidden | StudentTopK)
        if summed and self.stabiliser != Unclipped():
            raise ValueError(
                f"the cache `{self.cache.type}` is summed under the present student, without an "
                "importance ratio, so there is nothing to stabilise: leave out "
                "estimator.stabiliser, or take a cache that is drawn (sampled, multi_sample, "
                "poisson, top_k_tail)"
            )
        if self.stabiliser != Unclipped() and getattr(self.cache, "max_ratio", False):
            raise ValueError(
                "estimator.cache.max_ratio and estimator.stabiliser both limit what an id weighs: "
                "set estimator.cache.max_ratio = 0, or leave out estimator.stabiliser"
            )
        return self


class ForwardKL(Section):
    """KL(teacher || student): the student covers all that the teacher would say."""

    type: Literal["forward_kl"] = "forward_kl"
    cache: Annotated[
        TeacherTopK | TeacherMultiSample | TeacherHidden | Dense, Field(discriminator="type")
    ] = TeacherHidden()
    """What is cached of the two distributions at each token."""


class JensenShannon(Section):
    """The generalised Jensen-Shannon divergence of GKD, between forward and reverse KL:
    beta KL(teacher || m) + (1 - beta) KL(student || m), m = beta teacher + (1 - beta) student."""

    type: Literal["jsd"] = "jsd"
    beta: float = Field(0.5, ge=0, le=1)
    """0 is the forward KL and 1 the reverse KL, which are its limits over beta and 1 - beta."""
    cache: Annotated[
        Poisson | StudentTopK | TeacherTopK | TeacherHidden | Dense, Field(discriminator="type")
    ] = TeacherHidden()
    """What is cached of the two distributions at each token."""

    @model_validator(mode="after")
    def _can_be_estimated(self) -> "JensenShannon":
        if self.beta == 0 and isinstance(self.cache, Poisson | StudentTopK):
            raise ValueError(
                f"beta = 0 is the forward KL, which weighs ids by the teacher: the cache "
                f"`{self.cache.type}` holds what the student thinks likely; take teacher_top_k"
            )
        return self


Estimator = Annotated[ReverseKL | ForwardKL | JensenShannon, Field(discriminator="type")]
Cache = (
    Sampled
    | MultiSample
    | StudentTopK
    | Poisson
    | TopKTail
    | TeacherHidden
    | Dense
    | TeacherTopK
    | TeacherMultiSample
)


def chosen_by_teacher(cache: Cache) -> bool:
    """Whether the sampler keeps nothing: the teacher chooses the ids, or takes all of them."""
    return isinstance(cache, TeacherTopK | TeacherMultiSample) or is_whole(cache)


def is_whole(cache: Cache) -> bool:
    """Whether the learner sees the teacher's whole vocabulary."""
    return isinstance(cache, Dense | TeacherHidden)


class OptimizerConfig(Section):
    """How gradients become weights."""

    type: Literal["adamw", "muon"] = "adamw"
    """`muon` orthogonalises the updates of the hidden layers' matrices; the rest takes AdamW."""
    lr: float = Field(1e-5, gt=0)
    """Peak learning rate of AdamW."""
    matrix_lr: float = Field(0.01, gt=0)
    """Peak learning rate of the matrices under `muon`."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices and embeddings."""
    warmup_steps: int = Field(2, ge=0)
    """Steps of linear rise to the peak."""
    final_fraction: float = Field(0.05, ge=0, le=1)
    """Fraction of the peak that is left at the last step, after a linear decay."""
    clip: float = Field(1.0, gt=0)
    """Largest norm of the gradient."""


class TrainingConfig(Section):
    """What a step is made of."""

    steps: int = Field(gt=0)
    """Steps of the run. A step trains on one batch of responses, then publishes weights once."""
    batch: int = Field(64, gt=0)
    """Responses in a step."""
    mini_batches: int = Field(1, gt=0)
    """Optimizer updates that share a step's batch."""
    passes: int = Field(1, gt=0)
    """Times a step goes over its batch."""
    micro_tokens: int = Field(8192, gt=0)
    """Padded tokens in one forward and backward pass. Gradients don't depend on it; memory does."""


class StalenessConfig(Section):
    """How far generation may run ahead of training."""

    max: int = Field(1, ge=0)
    """Greatest age, in steps, of a token that reaches the loss. 0 is strict synchronous training;
    more keeps all workers busy through long responses, on older data."""
    older: Literal["mask", "drop", "wait"] = "mask"
    """Of a response with tokens beyond the bound: train on its fresh tokens only, drop it and queue
    its prompt again, or let the learner wait for the oldest response so that none gets so old."""
    barrier: bool = False
    """Work in whole batches, as n-step-off training does: rollout workers start a batch together,
    under the newest weights and when the last one is complete, and the teacher waits for all of it.
    For comparison."""
    depth: int = Field(0, ge=0)
    """Responses that are kept outstanding, at least a batch and at most the bound's permits. 0
    finds as few as keep everybody busy, step by step."""


class CheckpointConfig(Section):
    """Segments: what is redone after a failure."""

    every: int = Field(25, gt=0)
    """Steps between two checkpoints. A failed segment starts again from its checkpoint."""
    keep: int = Field(2, gt=0)
    """Checkpoints kept on storage; older ones are deleted."""
    retries: int = Field(2, ge=0)
    """Times that a segment is tried again before the run fails."""


class TrackingConfig(Section):
    """MLflow."""

    uri: str = ""
    """Tracking URI; empty is MLFLOW_TRACKING_URI from the environment or, without it, a SQLite file
    in `directory`. A password belongs into the environment: it is refused here."""
    experiment: str = "opdflow"
    """Experiment under which runs are listed."""
    model_name: str = "student"
    """Registered model whose new version gets the alias `candidate`."""

    @field_validator("uri")
    @classmethod
    def _holds_no_password(cls, uri: str) -> str:
        if "@" in uri.partition("://")[2].partition("/")[0]:
            raise ValueError(
                "holds a user or password, and configurations are logged; set MLFLOW_TRACKING_URI, "
                "or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, in the environment"
            )
        return uri


class GuardConfig(Section):
    """A further evaluation set, on which a candidate must not lose."""

    path: str
    """As `prompts.path`. Its prompts are left out of training."""
    limit: int = Field(256, gt=0)
    """At most this many prompts, from the top of the file."""
    margin: float = Field(0.05, gt=0)
    """The candidate must be shown to lose less accuracy than this; on a set without answers, to
    gain less KL in nats/token."""


class GateConfig(Section):
    """Which candidate of a night becomes champion."""

    level: float = Field(0.05, gt=0, lt=0.5)
    """Largest chance that a candidate no better than the champion is promoted. Lower asks for more
    evidence: larger gains, or more held-out prompts."""
    gain: float = Field(0.0, ge=0, lt=1)
    """Held-out accuracy must be shown to have risen by more than this."""
    kl_gain: float = Field(0.0, ge=0)
    """Or else the KL, in nats/token, must be shown to have fallen by more than this, ..."""
    loss: float = Field(0.05, gt=0, lt=1)
    """... while the accuracy is shown to have fallen by less than this."""
    guards: dict[str, GuardConfig] = {}
    """Further sets by name, on which no candidate may lose: tables `gate.guards.NAME` with `path`,
    `limit` (256) and `margin` (0.05 of accuracy; of KL on a set without answers)."""


class NightlyConfig(Section):
    """A night of `opdflow nightly`."""

    min_prompts: int = Field(0, ge=0)
    """With fewer new prompts than this the night ends without training, and they wait for the next
    one. A batch is needed in any case."""
    export: str = ""
    """Folder at any fsspec URL to which the table of nights is written after each, as Parquet and
    CSV; empty is `nights/export` in `directory`."""


class RunConfig(Section):
    """One run of `distill`."""

    student: StudentConfig
    teacher: TeacherConfig
    prompts: PromptsConfig
    evaluation: EvaluationConfig
    training: TrainingConfig
    rollout: RolloutConfig = RolloutConfig()
    scoring: ScoringConfig = ScoringConfig()
    estimator: Estimator = ReverseKL()
    optimizer: OptimizerConfig = OptimizerConfig()
    staleness: StalenessConfig = StalenessConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    gate: GateConfig = GateConfig()
    nightly: NightlyConfig = NightlyConfig()
    directory: str = "runs"
    """Folder for runs, the teacher cache and, by default, MLflow's and Prefect's databases."""
    ray_address: str = ""
    """Address of a running Ray cluster; empty starts one on this machine for the run."""
    seed: int = 0
    """Seeds prompts' order, sampling and mini-batches."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> "RunConfig":
        if self.training.mini_batches > self.training.batch:
            raise ValueError(
                f"training.mini_batches ({self.training.mini_batches}) is larger than "
                f"training.batch ({self.training.batch}): a mini-batch needs a response"
            )
        permits = (self.staleness.max + 1) * self.training.batch
        if self.staleness.depth and not self.training.batch <= self.staleness.depth <= permits:
            raise ValueError(
                f"staleness.depth ({self.staleness.depth}) is to be at least training.batch "
                f"({self.training.batch}) and at most (staleness.max + 1) * training.batch "
                f"({permits}), or 0"
            )
        return self


def load(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Reads a run's TOML file and applies overrides of the form `key.sub=value`.

    Paths in the file are taken as they are, relative to the working directory.
    Raises ConfigError naming the file, the key and the nearest valid key.
    """
    try:
        with Path(path).open("rb") as file:
            data = tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    for text in overrides or []:
        override(data, text)
    return parse(data, str(path))


def parse(data: dict[str, Any], where: str) -> RunConfig:
    """Validates a run given as plain data; `where` names it in errors."""
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        lines = [_explain(problem) for problem in error.errors()]
        raise ConfigError("\n".join(f"{where}: {line}" for line in lines)) from None


def override(data: dict[str, Any], assignment: str) -> None:
    """Applies `key.sub=value` to plain data; the value is TOML, or else a string."""
    key, equals, text = assignment.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {assignment!r}: write key.sub=value")
    *tables, leaf = key.strip().split(".")
    for table in tables:
        data = data.setdefault(table, {})
        if not isinstance(data, dict):
            raise ConfigError(f"override {assignment!r}: {table!r} is a value, not a table")
    try:
        data[leaf] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        data[leaf] = text  # an unquoted string, as a shell gives it


def valid_keys(section: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Every key that a configuration file may hold, dotted; variants of a union share a prefix."""
    for name, field in section.model_fields.items():
        yield prefix + name
        for nested in sections(field.annotation):
            yield from valid_keys(nested, f"{prefix}{name}.")


def sections(annotation: Any) -> list[type[BaseModel]]:
    """The tables that a field of this type may be; several for a union of variants."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, Annotated):
        return [s for part in typing.get_args(annotation) for s in sections(part)]
    return []


def _explain(problem: Any) -> str:
    keys = list(dict.fromkeys(valid_keys()))
    parts = [str(part) for part in problem["loc"]]
    # A union puts its variant's tag into the location; the file has no such table. A key that no
    # table knows can only come last, and a validator of ours speaks of the whole table.
    dotted = ""
    for position, part in enumerate(parts):
        candidate = f"{dotted}.{part}" if dotted else part
        unknown = position == len(parts) - 1 and problem["type"] != "value_error"
        if candidate in keys or unknown:
            dotted = candidate
    if problem["type"] == "extra_forbidden" and dotted in keys:
        return f"`{dotted}` is a key of another type of this table: set `type`, or leave it out"
    if problem["type"] == "extra_forbidden":
        # A key put into the wrong table is found by its last part.
        near = [k for k in keys if k.split(".")[-1] == parts[-1]][:1]
        near = near or difflib.get_close_matches(dotted, keys, n=1, cutoff=0.5)
        hint = f"; did you mean `{near[0]}`?" if near else ""
        return f"unknown key `{dotted}`{hint}"
    if problem["type"] == "missing":
        return f"`{dotted}` is required and missing"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":  # our own words; the value may be a secret
        return f"`{dotted}` {message}" if dotted else message
    return f"`{dotted}`: {message} (got {problem['input']!r})" if dotted else message
