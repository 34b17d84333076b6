"""A fine-tuning job from recipe to saved model. Prints nothing; tells a reporter."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch

import roundpipe
from roundpipe.cli.adapters import check_adapter, save_model, with_adapter
from roundpipe.cli.batches import (
    Batch,
    encode,
    evaluation_batches,
    pad_token_id,
    training_batches,
)
from roundpipe.cli.documents import Corpus, read_corpus
from roundpipe.cli.history import HeldOutRecord, History, Sample, StepRecord, plot_losses
from roundpipe.cli.model_source import LoadedModel, find_model, load_model
from roundpipe.cli.optimizers import find_optimizer, lr_factor
from roundpipe.cli.problems import CommandInterrupted, TrainingError
from roundpipe.cli.recipe import Recipe, SampleSection
from roundpipe.cli.recipe_file import write_recipe
from roundpipe.cli.run_folder import METRICS_FILE, RECIPE_FILE, RunFolder
from roundpipe.cli.training import Trainer, dtype_named


class Reporter(Protocol):
    """Who is told what happens."""

    def working(self, on: str) -> AbstractContextManager[object]:
        """Something that takes a while begins, and ends with the context."""

    def fact(self, name: str, value: str) -> None:
        """Something about the job is known."""

    def sample(self, when: str, sample: Sample) -> None:
        """The model generated something."""

    def training(self) -> AbstractContextManager[object]:
        """Training begins, and ends with the context."""

    def step(self, record: StepRecord) -> None:
        """A training step is done."""

    def held_out(self, record: HeldOutRecord) -> None:
        """A held-out loss is known."""

    def saved(self, folder: Path, history: History) -> None:
        """All is done and saved."""


class FineTuning:
    """Runs a recipe.

    Args:
        recipe: what to do.
        reporter: who is told.
    """

    def __init__(self, recipe: Recipe, reporter: Reporter) -> None:
        self._recipe = recipe
        self._reporter = reporter
        self._step = 0

    def run(self) -> None:
        """Load, train, evaluate, save.

        Raises:
            UsageError: the recipe asks for something that is not there or does not fit.
            TrainingError: the loss became infinite or no number.
            CommandInterrupted: Ctrl-C; nothing was saved.
        """
        try:
            self._run()
        except KeyboardInterrupt:
            steps = self._recipe.training.steps
            done = (
                f"after {self._step} of {steps} steps"
                if self._step
                else "before the first step was done"
            )
            raise CommandInterrupted(
                f"Interrupted {done}. Nothing was saved; {self._recipe.output.folder} is as it "
                "was before."
            ) from None

    def _run(self) -> None:
        recipe = self._recipe
        # What can be wrong is found out before the minutes of loading and training.
        find_optimizer(recipe.optimizer.name)
        check_adapter(recipe.adapter)
        files = find_model(recipe.model.source)
        with RunFolder(recipe.output.folder, recipe.output.overwrite) as folder:
            with self._reporter.working("reading the data"):
                corpus = read_corpus(recipe.data)
            with self._reporter.working(f"reading the model {files.label}"):
                loaded = load_model(files, dtype_named(recipe.model.dtype))
                loaded = with_adapter(loaded, recipe.adapter, recipe.seed)
            with (folder.path / METRICS_FILE).open("w", encoding="utf-8") as metrics:
                history = History(metrics)
                self._fine_tune(loaded, corpus, history)
            with self._reporter.working("saving"):
                self._save(folder.path, loaded, history)
                folder.commit()
        self._reporter.saved(folder.target, history)

    def _fine_tune(self, loaded: LoadedModel, corpus: Corpus, history: History) -> None:
        torch.manual_seed(self._recipe.seed)
        train, held_out = self._batches(loaded, corpus)
        with self._reporter.working("cutting the model into layers"):
            trainer = Trainer(loaded.model, self._recipe)
        with trainer:
            self._describe(trainer)
            self._sample("before", loaded, corpus.is_chat)
            with self._reporter.training():
                self._train(trainer, train, held_out, history)
        loaded.model.eval()
        self._sample("after", loaded, corpus.is_chat)

    def _batches(self, loaded: LoadedModel, corpus: Corpus) -> tuple[Iterator[Batch], list[Batch]]:
        data, size = self._recipe.data, self._recipe.training.batch_size
        with self._reporter.working("encoding the data"):
            train = encode(corpus.train, loaded.tokenizer, data.sequence_length)
            held_out = encode(corpus.held_out, loaded.tokenizer, data.sequence_length)
        self._reporter.fact("model", loaded.summary)
        self._reporter.fact(
            "data",
            f"{corpus.label} · {len(corpus.train):,} documents, {len(train):,} sequences · held "
            f"out: {len(corpus.held_out):,} documents, {len(held_out):,} sequences",
        )
        pad_id = pad_token_id(loaded.tokenizer)
        return (
            training_batches(train, size, pad_id, self._recipe.seed),
            evaluation_batches(held_out, size, pad_id, data.eval_sequences),
        )

    def _describe(self, trainer: Trainer) -> None:
        recipe, fact = self._recipe, self._reporter.fact
        training, schedule = recipe.training, recipe.schedule
        optimizer = trainer.optimizer
        library = type(optimizer).__module__.partition(".")[0]
        fused = " (fused)" if optimizer.defaults.get("fused") else ""
        warmup = f", {schedule.warmup_steps} warm-up steps" if schedule.warmup_steps else ""
        clip = f" · clipped at {training.clip_norm:g}" if training.clip_norm else ""
        way = "asynchronous" if training.async_step else "synchronous"
        fact(
            "batch",
            f"{training.batch_size} x {recipe.data.sequence_length} tokens in "
            f"{trainer.num_microbatch} microbatches · {training.steps} {way} steps",
        )
        fact(
            "optimizer",
            f"{library} {type(optimizer).__name__}{fused} · {schedule.kind} lr "
            f"{recipe.optimizer.lr:g}{warmup} · weight decay {recipe.optimizer.weight_decay:g}"
            f"{clip}",
        )
        fact("weights", f"{recipe.model.dtype}, masters {recipe.model.master_dtype}")
        fact("devices", ", ".join(trainer.device_names))

    def _train(
        self, trainer: Trainer, train: Iterator[Batch], held_out: list[Batch], history: History
    ) -> None:
        training = self._recipe.training
        self._evaluate(trainer, held_out, history)
        for step in range(1, training.steps + 1):
            batch = next(train)
            start = time.perf_counter()
            loss = trainer.train_step(batch)
            _check_finite(loss, step)
            seconds = time.perf_counter() - start
            lr = self._recipe.optimizer.lr * lr_factor(
                self._recipe.schedule, training.steps, step - 1
            )
            record = StepRecord(step, loss, lr, batch.num_tokens, seconds)
            self._step = step
            history.add_step(record)
            history.updates_done(trainer.grad_norms)
            self._reporter.step(record)
            if step == training.steps or (training.eval_every and step % training.eval_every == 0):
                self._evaluate(trainer, held_out, history)

    def _evaluate(self, trainer: Trainer, held_out: list[Batch], history: History) -> None:
        trainer.finish()
        history.updates_done(trainer.grad_norms)
        start = time.perf_counter()
        with self._reporter.working("held-out loss"):
            loss = trainer.held_out_loss(held_out)
        record = HeldOutRecord(self._step, loss, time.perf_counter() - start)
        history.add_held_out(record)
        self._reporter.held_out(record)

    def _sample(self, when: str, loaded: LoadedModel, chat_data: bool) -> None:
        section = self._recipe.sample
        if section is None:
            return
        chat = chat_data if section.chat is None else section.chat
        with self._reporter.working("generating"):
            continuation = generate(loaded, section, chat)
        self._reporter.sample(when, Sample(section.prompt, continuation))

    def _save(self, folder: Path, loaded: LoadedModel, history: History) -> None:
        import transformers

        save_model(loaded, folder)
        plot_losses(history, f"{loaded.label}, fine-tuned", folder / "loss.png")
        versions = (
            f"roundpipe {roundpipe.__version__}, torch {torch.__version__}, transformers "
            f"{transformers.__version__}, Python {platform.python_version()}"
        )
        comments = ("The recipe of this run with every default filled in.", versions)
        write_recipe(self._recipe, folder / RECIPE_FILE, comments)


def _check_finite(loss: float, step: int) -> None:
    if not math.isfinite(loss):
        raise TrainingError(
            f"the loss became {loss} in step {step}; nothing was saved. Try a lower optimizer.lr, "
            "some schedule.warmup_steps, or a smaller training.clip_norm"
        )


def generate(loaded: LoadedModel, section: SampleSection, chat: bool) -> str:
    """What ``model.generate`` adds to the prompt, greedily.

    Args:
        loaded: the model and its tokenizer.
        section: prompt and length.
        chat: give the prompt as a user's message in the chat template.
    """
    tokenizer: Any = loaded.tokenizer
    if chat:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": section.prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
    else:
        inputs = tokenizer(section.prompt, return_tensors="pt")
    output = loaded.model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=section.max_new_tokens,
        do_sample=False,
        pad_token_id=pad_token_id(tokenizer),
    )
    new = output[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(new, skip_special_tokens=True))
