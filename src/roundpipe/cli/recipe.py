"""What a recipe may say: its sections, their keys, their defaults.

Every key has a default except ``model.source`` and ``output.folder``. Values are checked strictly:
the text ``"4"`` is no number, ``true`` is no number either.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

BUILTIN_PYTHON_REFERENCE = "builtin:python-reference"

DtypeName = Literal["float32", "bfloat16"]


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Sources = Annotated[list[str], BeforeValidator(_as_list), Field(min_length=1)]


class Section(BaseModel):
    """A group of keys; an unknown one is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ModelSection(Section):
    """The model to start from.

    Attributes:
        source: a folder in the HuggingFace layout, a ``.gguf`` file, ``package:NAME`` (a GGUF file
            or a model folder inside an installed Python package, ``package:NAME/FILE`` where it
            has several), or a name on the HuggingFace hub.
        dtype: of the weights that are trained and saved.
        master_dtype: of the copy that the optimizer works on.
    """

    source: Annotated[str, Field(min_length=1)]
    dtype: DtypeName = "float32"
    master_dtype: DtypeName = "float32"


class AdapterSection(Section):
    """LoRA adapters to train instead of the weights.

    Attributes:
        rank: inner width of an adapter.
        alpha: an adapter's output is multiplied by ``alpha / rank``.
        dropout: on an adapter's input, while training.
        targets: names of the modules that get adapters, or ``all-linear`` for all linear layers
            but the head.
        dora: train the magnitudes of the weights' columns, too.
        modules_to_save: names of modules that are trained and saved as a whole.
    """

    rank: Annotated[int, Field(ge=1)] = 8
    alpha: Annotated[float, Field(gt=0)] = 16
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    targets: Literal["all-linear"] | Sources = "all-linear"
    dora: bool = False
    modules_to_save: list[str] = []


class DataSection(Section):
    """What to train on, and what to hold out.

    Attributes:
        source: ``builtin:python-reference``, or one path or a list of them: ``.jsonl`` files with
            one ``{"text": ...}`` or ``{"messages": [...]}`` a line, any other file as plain text.
        held_out_source: the same for the held-out data. Without it, ``held_out`` decides.
        held_out: the share of the documents that is kept out of training.
        sequence_length: tokens per sequence; texts are joined and cut to it, chats are truncated.
        eval_sequences: how many held-out sequences the held-out loss is taken over, at most.
    """

    source: Sources = [BUILTIN_PYTHON_REFERENCE]
    held_out_source: Sources | None = None
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.1
    sequence_length: Annotated[int, Field(ge=2)] = 128
    eval_sequences: Annotated[int, Field(ge=1)] = 32


class TrainingSection(Section):
    """How to train.

    Attributes:
        steps: optimizer steps.
        batch_size: sequences per step.
        microbatches: pieces that a batch is cut into; the pipeline's own choice without it.
        eval_every: steps between held-out losses; 0 for only before and after.
        clip_norm: largest norm of the gradient; no clipping without it.
        async_step: let the optimizer work while the next step computes (its gradients are then
            taken at weights that are one update old).
        recompute_grain: recompute whole stages, or layer by layer with less memory.
    """

    steps: Annotated[int, Field(ge=1)] = 32
    batch_size: Annotated[int, Field(ge=1)] = 4
    microbatches: Annotated[int, Field(ge=1)] | None = None
    eval_every: Annotated[int, Field(ge=0)] = 8
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    async_step: bool = True
    recompute_grain: Literal["stage", "layer"] = "stage"


class OptimizerSection(Section):
    """The optimizer.

    Attributes:
        name: a class of ``roundpipe.optim`` or ``torch.optim``, looked for in this order.
        lr: learning rate after the warm-up.
        weight_decay: passed on to the optimizer.
        options: further arguments of the optimizer, such as ``betas: [0.9, 0.95]``.
    """

    name: Annotated[str, Field(min_length=1)] = "AdamW"
    lr: Annotated[float, Field(gt=0)] = 5e-5
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    options: dict[str, Any] = {}


class ScheduleSection(Section):
    """The learning rate over the steps.

    Attributes:
        kind: the shape after the warm-up.
        warmup_steps: steps in which the rate rises linearly to ``optimizer.lr``.
        final_ratio: where ``linear`` and ``cosine`` end, as a share of ``optimizer.lr``.
    """

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    final_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0


class SampleSection(Section):
    """The text to generate before and after, greedily.

    Attributes:
        prompt: what the model is given.
        max_new_tokens: how much it may add.
        chat: give the prompt as a user's message in the tokenizer's chat template; by default only
            when the training data are chats.
    """

    prompt: Annotated[str, Field(min_length=1)]
    max_new_tokens: Annotated[int, Field(ge=1)] = 48
    chat: bool | None = None


class OutputSection(Section):
    """Where the results go.

    Attributes:
        folder: created; relative to the current folder.
        overwrite: replace the folder if it holds an earlier run.
    """

    folder: Annotated[str, Field(min_length=1)]
    overwrite: bool = False


class Recipe(Section):
    """A whole fine-tuning job.

    Attributes:
        adapter: all weights are trained without it.
        sample: nothing is generated without it.
        devices: ``auto``, ``accelerator``, ``cpu:N`` or ``cuda:0,cuda:1``.
        seed: of the order of the data and of dropout.
    """

    model: ModelSection
    adapter: AdapterSection | None = None
    data: DataSection = DataSection()
    training: TrainingSection = TrainingSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    sample: SampleSection | None = None
    output: OutputSection
    devices: Annotated[str, Field(min_length=1)] = "auto"
    seed: Annotated[int, Field(ge=0)] = 0
