"""A training recipe: its keys with their defaults and limits. `recipe_reading` makes one from a YAML file."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..configuration.errors import NormalignError


Tune = Literal["frozen", "full"]
TuneOrAdapt = Literal["frozen", "full", "lora"]
Arm = Literal["none", "default", "aligned", "aligned_gwc", "rms", "scale"]

# Source: arXiv 2512.08374, Table 5 for `default`; `rms` and `scale` leave GWC to compose.aligned_norm.gwc
ARMS: dict[str, dict[str, Any]] = {
    "none": {"kind": "none"},
    "default": {"kind": "layernorm", "gain_init": 1.0, "gwc": False},
    "aligned": {"kind": "layernorm", "gain_init": "text", "gwc": False},
    "aligned_gwc": {"kind": "layernorm", "gain_init": "text", "gwc": True},
    "rms": {"kind": "rmsnorm", "gain_init": "text"},
    "scale": {"kind": "scale", "gain_init": "text"},
}
_SOURCES = ("model", "from_stage", "compose")
_MOST_ROWS = 10_000_000
# far beyond any use; above 1e37 the optimizer's own sums overflow
_HIGHEST_RATE = 1_000_000
_MOST = {
    "batch_size": 10_000_000,
    "epochs": 1_000_000,
    "max_steps": 1_000_000_000,
    "dataloader_workers": 1024,
    "lora.rank": 65_536,
    "data.weight": 1000,
    "eval_data.rows": _MOST_ROWS,
}


class RecipeError(NormalignError):
    """A recipe that cannot be run; the message says which key, and what to write."""


@dataclass
class ComposeSettings:
    """What a run that starts from two backbones is put together from (see `normalign.assembly.compose`).

    `vision` and `text` are Hub ids or folders; `aligned_norm` is the block of the model's config.
    """

    vision: str
    text: str
    aligned_norm: dict[str, Any] = field(default_factory=dict)
    vision_feature_layer: int | None = None
    seed: int | None = None


@dataclass
class TuneSettings:
    """What is trained of each part of the model; `lora` puts PEFT's adapters on its linear layers."""

    vision: TuneOrAdapt = "frozen"
    projector: Tune = "full"
    norm: Tune = "full"
    language: TuneOrAdapt = "frozen"


@dataclass
class PartFigures:
    """A figure for all parts that are trained, with other ones for single parts. A plain number means `all`."""

    all: float
    vision: float | None = None
    projector: float | None = None
    norm: float | None = None
    language: float | None = None

    def of(self, part: str) -> float:
        """The figure of one of the four parts."""
        own = getattr(self, part)
        return self.all if own is None else own

    def given(self) -> dict[str, float]:
        """The figures that are there, by their keys."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}


@dataclass
class LoraSettings:
    """The adapters of the parts whose `tune` is `lora`.

    Args:
        rank, alpha, dropout: as in PEFT; the adapters' output is scaled by alpha / rank.
        language_targets, vision_targets: last names of the linear layers to adapt; null is all of that part, never
            lm_head.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    language_targets: list[str] | None = None
    vision_targets: list[str] | None = None


@dataclass
class DataSource:
    """One data set.

    Args:
        name: `digit_scenes` is built in; `trl` has rows of `messages` and `images`; `llava` has rows of `conversations`
            with <image> marks and an `image` (LLaVA's JSON, LLaVA-NeXT's parquet).
        path: a JSON, JSONL or parquet file, a folder of parquet files, a folder of Dataset.save_to_disk, or a Hub id.
        split: which split of a Hub id or of a saved DatasetDict.
        images: the folder that image paths in the rows start from; null is the folder of `path`.
        rows: how many rows, the first of them; null is all (of digit_scenes: 1000).
        seed, stage: of digit_scenes alone: what is drawn, and captions (1) or questions (2).
        streaming: rows are read as they are needed, and the data set is never held as a whole.
        weight: in a mixture, how often its rows are drawn beside those of weight 1.
    """

    name: Literal["digit_scenes", "trl", "llava"] = "digit_scenes"
    path: str | None = None
    split: str = "train"
    images: str | None = None
    rows: int | None = None
    seed: int = 0
    stage: Literal[1, 2] = 1
    streaming: bool = False
    weight: float = 1.0


@dataclass
class DataSettings(DataSource):
    """What is trained on: one data set, or a `mixture` of several."""

    mixture: list[DataSource] | None = None

    def sources(self) -> list[DataSource]:
        """The data sets, one or several."""
        return [self] if self.mixture is None else self.mixture


@dataclass
class Recipe:
    """One training run. Exactly one of `model`, `from_stage` and `compose` says where it starts.

    Args:
        name: the stage's name, shown on the progress bar and in the log.
        output_dir: where the finished folder, its checkpoints and train_log.jsonl go; a new or empty folder.
        overwrite: remove an earlier run's folder first, if `output_dir` is one.
        model: a folder or Hub id to go on from.
        from_stage: the name of a former stage's folder, next to `output_dir`.
        compose: the backbones to start from.
        arm: shorthand for the norm's kind, start and GWC; a run that goes on from a model must have that arm already.
        tune, lora, quantization: what is trained of each part, the adapters' size, and whether the frozen language model
            is held in 4 bits (bitsandbytes).
        learning_rate, weight_decay: one figure, or a block with `all` and single parts. The norm is never decayed.
        batch_size: rows in one step over all processes.
        per_device_batch_size: rows that one process takes at once; the accumulation steps follow from it.
        gradient_accumulation: accumulation steps instead; without both, a process takes its whole share at once.
        epochs: passes over the data; `max_steps` stops earlier or goes on longer where it is set.
        warmup: steps, or below 1 the share of all steps.
        max_grad_norm: the global gradient norm is clipped to it; 0 clips nothing.
        max_length: tokens of a row, images included; a longer row is a bad row. null is the language model's limit.
        on_bad_row: `error` stops before the first step with the list of rows; `skip` leaves them out and says so.
        batching: `padded`, or `padding_free`: the rows of a batch lie end to end, none sees another.
        group_by_length: batches of rows of like length.
        cache_vision_features: the outputs of a frozen vision encoder are computed once and kept in `cache_dir`
            (null: beside output_dir).
        gradient_checkpointing: recomputes activations in the backward pass, for less memory and more time.
        attn_implementation: `auto` takes FlashAttention where GPU and package are there, else sdpa; or a name that
            transformers knows.
        precision: `auto` is bfloat16 autocast where the GPU has it, else float32. The norm is float32 always.
        eval_generation: how many held-out rows the model answers while it trains; null is none.
        eval_steps: every how many steps it answers them, a multiple of logging_steps; null is after the last step alone.
        eval_data: the held-out rows; null is, of the built-in scenes, those of the split that is not trained on.
        save_steps: a checkpoint every so many steps; null keeps the finished folder alone.
        save_total_limit: how many checkpoints stay.
        resume: `auto` goes on from the newest complete checkpoint of an unfinished run of the same recipe in output_dir.
        report_to: where figures go beside train_log.jsonl: tensorboard, wandb, trackio.
    """

    output_dir: str
    name: str = "train"
    model: str | None = None
    from_stage: str | None = None
    compose: ComposeSettings | None = None
    arm: Arm | None = None
    tune: TuneSettings = field(default_factory=TuneSettings)
    data: DataSettings = field(default_factory=DataSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    quantization: Literal["4bit"] | None = None
    optimizer: str = "adamw_torch"
    learning_rate: PartFigures = field(default_factory=lambda: PartFigures(1e-3))
    weight_decay: PartFigures = field(default_factory=lambda: PartFigures(0.0))
    schedule: Literal["cosine", "linear", "constant", "constant_with_warmup"] = "cosine"
    warmup: float = 0.03
    max_grad_norm: float = 1.0
    batch_size: int = 32
    per_device_batch_size: int | None = None
    gradient_accumulation: int | None = None
    epochs: float = 1.0
    max_steps: int | None = None
    max_length: int | None = None
    on_bad_row: Literal["error", "skip"] = "error"
    batching: Literal["padded", "padding_free"] = "padded"
    group_by_length: bool = False
    cache_vision_features: bool = False
    cache_dir: str | None = None
    gradient_checkpointing: bool = False
    attn_implementation: str = "auto"
    seed: int = 0
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    dataloader_workers: int = 0
    logging_steps: int = 10
    eval_generation: int | None = None
    eval_steps: int | None = None
    eval_data: DataSource | None = None
    save_steps: int | None = None
    save_total_limit: int | None = None
    resume: Literal["auto", "never"] = "auto"
    report_to: list[Literal["tensorboard", "wandb", "trackio"]] = field(default_factory=list)
    overwrite: bool = False

    def __post_init__(self):
        given = [name for name in _SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            raise RecipeError(
                "A recipe says where it starts by exactly one of 'model' (a folder or Hub id), 'from_stage' (a former "
                f"stage's name) and 'compose' (two backbones); this one has {' and '.join(given) or 'none of them'}."
            )
        self._check_places()
        self._check_numbers()
        self._check_evaluation()
        if self.compose is not None:
            self.compose.aligned_norm = self._aligned_norm_of_arm()

    def _check_places(self) -> None:
        compose = self.compose
        places = {"output_dir": self.output_dir, "model": self.model, "from_stage": self.from_stage}
        if compose is not None:
            places |= {"compose.vision": compose.vision, "compose.text": compose.text}
        for key, place in places.items():
            if place is not None and not place.strip():
                raise RecipeError(f"{key} is empty. Name a folder{'' if key == 'output_dir' else ' or a Hub id'}.")
        self.output_dir = str(Path(self.output_dir).expanduser())
        if Path(self.output_dir).is_file():
            raise RecipeError(f"output_dir is {self.output_dir}, which is a file. Name a folder to write.")

    def _check_numbers(self) -> None:
        for key, value in self._all_numbers():
            if isinstance(value, float) and not math.isfinite(value):
                raise RecipeError(f"{key} must be a finite number, got {value}.")
        positive = {"batch_size", "epochs", "logging_steps", "lora.rank", "lora.alpha", "max_steps", "save_steps"}
        positive |= {"save_total_limit", "max_length", "per_device_batch_size", "gradient_accumulation"}
        positive |= {"data.rows", "data.weight", "eval_generation", "eval_steps", "eval_data.rows"}
        for key, number in self._all_numbers():
            kind = re.sub(r"mixture\[\d+\]\.", "", key)
            if kind in positive and not number > 0:
                raise RecipeError(f"{key} must be above 0, got {number}.")
            if number > _MOST.get(kind, number):
                raise RecipeError(f"{key} must be at most {_MOST[kind]:,}, got {number:,}.")
        numbers = dict(self._all_numbers())
        if self.learning_rate.all == 0:
            raise RecipeError("learning_rate must be above 0, got 0.0. To leave a part as it is, freeze it by tune.")
        for key, rate in self.learning_rate.given().items():
            name = "learning_rate" if key == "all" else f"learning_rate.{key}"
            if not 0 <= rate <= _HIGHEST_RATE:
                limit = f"at most {_HIGHEST_RATE:,}" if rate > 0 else "above 0"
                raise RecipeError(f"{name} must be {limit}, got {rate:g}.")
        for key in ("warmup", "max_grad_norm", "dataloader_workers", "lora.dropout"):
            if not numbers[key] >= 0:
                raise RecipeError(f"{key} must not be negative, got {numbers[key]}.")
        if numbers["lora.dropout"] >= 1:
            raise RecipeError(f"lora.dropout must be below 1, got {numbers['lora.dropout']}.")
        if min(self.weight_decay.given().values()) < 0:
            raise RecipeError(f"weight_decay must not be negative, got {min(self.weight_decay.given().values())}.")
        for source in self.data.sources():
            if source.name == "digit_scenes" and not 0 < (source.rows or 1) <= _MOST_ROWS:
                raise RecipeError(
                    f"data.rows must be above 0 and at most {_MOST_ROWS:,}, got {source.rows:,}: all rows are "
                    f"drawn before the first step. For a longer run set epochs."
                )
        self._check_seeds()

    def _check_evaluation(self) -> None:
        if self.eval_generation is None:
            given = [key for key in ("eval_steps", "eval_data") if getattr(self, key) is not None]
            if given:
                raise RecipeError(
                    f"{' and '.join(given)} without eval_generation: nothing would be evaluated. Set eval_generation to the "
                    f"number of held-out rows to answer, or leave the other key{'s' * (len(given) > 1)} out too."
                )
            return
        # an evaluation stands in the line of its step, and the loss is averaged as without it
        if self.eval_steps is not None and self.eval_steps % self.logging_steps:
            near = max(1, round(self.eval_steps / self.logging_steps)) * self.logging_steps
            raise RecipeError(
                f"eval_steps {self.eval_steps} is no multiple of logging_steps {self.logging_steps}: an evaluation stands in "
                f"the log's line of its step. Set eval_steps to {near}, or logging_steps to a divisor of {self.eval_steps}."
            )
        held_out = self.held_out_source()
        if held_out.streaming or held_out.weight != 1:
            key = "streaming" if held_out.streaming else "weight"
            raise RecipeError(f"eval_data.{key} has no meaning: single rows are chosen, by number. Leave it out.")
        for source in self.data.sources():
            if held_out.path is not None and _place(source) == _place(held_out):
                raise RecipeError(
                    f"eval_data names {held_out.path}, which is trained on: what a model has seen is not held out. Name other "
                    f"rows, in a file of their own or, of a Hub id, by eval_data.split."
                )

    def held_out_source(self) -> DataSource:
        """Where the held-out rows are that `eval_generation` answers.

        Raises:
            RecipeError: there are none: `eval_data` is null, and what is trained on is not the built-in scenes alone.
        """
        if self.eval_data is not None:
            return self.eval_data
        if self.data.mixture is None and self.data.name == "digit_scenes":
            return DataSource(stage=self.data.stage, seed=self.data.seed)
        raise RecipeError(
            "eval_generation needs held-out rows, and the recipe has none. Name them by eval_data, as in eval_data: "
            "{name: trl, path: held_out.jsonl, images: photos}; only the built-in scenes have some of their own."
        )

    def _all_numbers(self) -> list[tuple[str, float]]:
        """Every number that was given, by dotted key; `learning_rate.all` and `weight_decay.all` as the bare key."""
        found = []

        def walk(block: Any, prefix: str) -> None:
            for item in dataclasses.fields(block):
                value = getattr(block, item.name)
                key = prefix[:-1] if item.name == "all" else prefix + item.name
                if dataclasses.is_dataclass(value):
                    walk(value, f"{prefix}{item.name}.")
                elif isinstance(value, list):
                    for index, inner in enumerate(filter(dataclasses.is_dataclass, value)):
                        walk(inner, f"{prefix}{item.name}[{index}].")
                elif isinstance(value, int | float) and not isinstance(value, bool):
                    found.append((key, value))

        walk(self, "")
        return found

    def _check_seeds(self) -> None:
        for key, seed in self._all_numbers():
            if key.rpartition(".")[2] != "seed":
                continue
            # the trainer gives the run's seed to NumPy too, which takes 32 bits
            bits = 32 if key == "seed" else 63
            if not 0 <= seed < 2**bits:
                raise RecipeError(f"{key} must be from 0 to {2**bits - 1} (2**{bits} - 1), got {seed}.")

    def _aligned_norm_of_arm(self) -> dict[str, Any]:
        settings = self.compose.aligned_norm
        fixed = ARMS[self.arm] if self.arm else {}
        for key in sorted(set(settings) & set(fixed)):
            if settings[key] != fixed[key]:
                raise RecipeError(
                    f"arm: {self.arm} means aligned_norm.{key}: {fixed[key]}, but compose.aligned_norm.{key} is "
                    f"{settings[key]!r}. Leave out one of the two."
                )
        return {**fixed, **settings}

    def start_folder(self) -> str | None:
        """The folder or Hub id that the run goes on from; None where it composes.

        Raises:
            RecipeError: the stage named by `from_stage` has left no folder.
        """
        if self.from_stage is None:
            return self.model
        folder = Path(self.output_dir).parent / self.from_stage
        if (folder / "adapter_config.json").is_file():
            raise RecipeError(
                f"Stage '{self.name}' goes on from stage '{self.from_stage}', which has left an adapter, not a whole model. "
                f"Merge it (normalign export {folder} --out DIR), and name the result with --model DIR."
            )
        if not (folder / "config.json").is_file():
            raise RecipeError(
                f"Stage '{self.name}' goes on from stage '{self.from_stage}', but there is no finished folder {folder}. "
                f"Run that stage first, or name a folder with --model."
            )
        return str(folder)


def _place(source: DataSource) -> tuple[str, str] | None:
    """What tells the rows of two sources apart; None for the built-in scenes."""
    return None if source.path is None else (str(Path(source.path).expanduser().absolute()), source.split)
