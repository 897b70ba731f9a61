"""The model class of `lmms-eval --model normalign`: any image-text-to-text model, asked in batches as generate_answers asks it.

It is one of lmms-eval's "simple" models: a request is a text and the images before it, which is how a question is put here
everywhere else; and lmms-eval asks "chat" models for no log-likelihoods.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from accelerate import Accelerator
from accelerate.utils import tqdm
from lmms_eval.api.instance import Instance
from lmms_eval.api.model import lmms
from PIL import Image

from ..configuration.errors import NormalignError
from .batching import Failure, run_batched
from .generation import chat_prompts, generate_answers, load_model, question
from .images import open_image
from .loglikelihood import log_likelihoods


if TYPE_CHECKING:
    from transformers import PreTrainedModel

R = TypeVar("R")

logger = logging.getLogger(__name__)

# generation options that are read, and the values of others that ask for what is done anyway
_READ = ("max_new_tokens", "until")
_GREEDY = {"do_sample": (False,), "temperature": (0,), "num_beams": (1,), "top_p": (0, 1), "top_k": (0, 1)}
_MAX_NEW_TOKENS = 1024  # where a task sets none, as in other models of lmms-eval


@dataclass(frozen=True)
class _Asked:
    """A request with what is asked for: the continuation, or the generation options as text."""

    request: Instance
    text: str

    @property
    def name(self) -> str:
        return f"Document {self.request.doc_id} of the task {self.request.task_name}"

    @property
    def key(self) -> Hashable:
        """Equal for requests that are the same."""
        context, _, *where = self.request.args
        return self.request.task_name, self.request.doc_id, bool(where), *where[3:], context, self.text


@dataclass(frozen=True)
class _Ready:
    """A request as a conversation, images first, with these open; and the continuation that is scored."""

    conversation: list[dict[str, Any]]
    images: list[Image.Image]
    text: str


class NormalignModel(lmms):
    """Serves what `load_model` loads, one copy in each process.

    Args:
        pretrained: folder or Hub id of the model or PEFT adapter.
        batch_size: rows at once, or "auto"; a batch that does not fit into memory is halved.
        max_batch_size: where "auto" starts.
        device: moves the model, such as "cpu" on a machine with a GPU; only with one process.
        dtype: number format of the weights, such as "bfloat16"; by default the one they are stored in.

    Raises:
        NormalignError: `pretrained` is missing or cannot be loaded, or an option is unknown.
    """

    is_simple = True

    def __init__(
        self,
        pretrained: str = "",
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        dtype: str | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        if unknown:
            raise NormalignError(
                f"The model 'normalign' of lmms-eval has no option {', '.join(sorted(unknown))}; it takes pretrained, "
                f"batch_size, max_batch_size, device and dtype."
            )
        if not str(pretrained).strip():
            raise NormalignError("No model is named: give --model_args pretrained=FOLDER_OR_HUB_ID.")
        self.batch_size = _rows_at_once(batch_size, max_batch_size)
        # before loading: it chooses this process's GPU
        self.accelerator = Accelerator()
        self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes
        self._model, self.processor = load_model(pretrained, dtype)
        if device and self._world_size == 1:
            self._model = self._model.to(device)
        self.device = self._model.device
        self._noted: set[str] = set()

    @property
    def model(self) -> PreTrainedModel:
        return self._model

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Greedy answers, in order.

        Raises:
            NormalignError: a request could not be answered; names the task and the document.
        """
        groups: dict[tuple[int, tuple[str, ...]], list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            groups[self._generation_options(request.args[1])].append(number)
        answers: list[str | None] = [None] * len(requests)
        with self._progress(len(requests)) as bar:
            for (max_new_tokens, stop), numbers in groups.items():
                group = [_Asked(requests[number], repr(requests[number].args[1])) for number in numbers]
                generate = partial(self._generate, max_new_tokens=max_new_tokens, stop=stop)
                for number, text in zip(numbers, self._run(group, generate, bar), strict=True):
                    answers[number] = text
        return answers

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """(log-likelihood of the continuation, whether greedy decoding gives it) after text and images, in order.

        Raises:
            NormalignError: a request could not be scored; names the task and the document.
        """
        asked = []
        for request in requests:
            target = request.args[1]
            if callable(target):
                target = target(self._document(*request.args[3:]))
            asked.append(_Asked(request, str(target)))
        with self._progress(len(requests)) as bar:
            return self._run(asked, self._score, bar)

    def generate_until_multi_round(self, requests: list[Instance]) -> list[str]:
        """Not served.

        Raises:
            NormalignError: always; names the tasks.
        """
        names = ", ".join(sorted({str(request.task_name) for request in requests}))
        raise NormalignError(
            f"{names} asks in several rounds, which the model 'normalign' of lmms-eval does not do; leave the task out."
        )

    def _generate(self, batch: list[_Ready], max_new_tokens: int, stop: tuple[str, ...]) -> list[str]:
        return generate_answers(
            self.model,
            self.processor,
            [one.conversation for one in batch],
            [one.images for one in batch],
            batch_size=len(batch),
            max_new_tokens=max_new_tokens,
            stop=stop,
        )

    def _score(self, batch: list[_Ready]) -> list[tuple[float, bool]]:
        prompts = chat_prompts(self.processor, [one.conversation for one in batch])
        images, continuations = [one.images for one in batch], [one.text for one in batch]
        return log_likelihoods(self.model, self.processor, prompts, images, continuations, batch_size=len(batch))

    def _run(self, asked: list[_Asked], run: Callable[[list[_Ready]], list[R]], bar: tqdm) -> list[R]:
        """Results in order, the longest texts first. Requests that are the same are asked once.

        The same are the copies that make all processes have equally many (`__padding_only__`), and repeats: a greedy answer
        does not change.
        """
        copies = Counter(one.key for one in asked)
        first = {one.key: one for one in reversed(asked)}
        todo = sorted(first.values(), key=lambda one: -len(one.request.args[0]) - len(one.text))

        def done(numbers: list[int], results: list[R | Failure]) -> None:
            for one, result in zip((todo[number] for number in numbers), results, strict=True):
                if isinstance(result, Failure):
                    raise NormalignError(
                        f"{one.name} failed: {result}. lmms-eval cannot leave a document out of a score, so the run ends "
                        f"here; `normalign evaluate` counts it as a failure and goes on."
                    )
                context, target = one.request.args[:2]
                self.cache_hook.add_partial(
                    one.request.request_type, (context, one.text if callable(target) else target), result
                )
                bar.update(copies[one.key])

        results = run_batched(todo, run, batch_size=self.batch_size, prepare=self._ready, done=done)
        by_key = {one.key: result for one, result in zip(todo, results, strict=True)}
        return [by_key[one.key] for one in asked]

    def _ready(self, one: _Asked) -> _Ready:
        text, _, *where = one.request.args
        # the mutual information of a choice is asked without a document
        doc_to_visual, *document = where or [None]
        visuals = doc_to_visual(self._document(*document)) if doc_to_visual else None
        images = [
            visual if isinstance(visual, Image.Image) and visual.mode == "RGB" else open_image(visual, one.name)
            for visual in visuals or []
        ]
        return _Ready(question(text, len(images)), images, one.text)

    def _document(self, doc_id: int, task: str, split: str) -> Any:
        return self.task_dict[task][split][doc_id]

    def _generation_options(self, options: dict[str, Any]) -> tuple[int, tuple[str, ...]]:
        """(most new tokens, stop texts); what else a task asks for is noted, once in a run."""
        changing = {
            name
            for name, value in options.items()
            if name not in _READ and value is not None and value not in _GREEDY.get(name, ())
        }
        if (new := changing - self._noted) and self._rank == 0:
            logger.warning(
                f"Answers are greedy, and these options of the task are left aside: {', '.join(sorted(new))}"
            )
        self._noted |= changing
        until = options.get("until") or ()
        limit = options.get("max_new_tokens")
        return (
            _MAX_NEW_TOKENS if limit is None else int(limit),
            (until,) if isinstance(until, str) else tuple(until),
        )

    def _progress(self, total: int) -> tqdm:
        # the harness counts the processes itself where accelerate sees one
        return tqdm(total=total, disable=self._rank != 0, desc="normalign", unit="row")


def _rows_at_once(batch_size: int | str, most: int | None) -> int | str:
    if str(batch_size).startswith("auto"):
        return "auto" if most is None else int(most)
    if not str(batch_size).isdecimal() or int(batch_size) < 1:
        raise NormalignError(f"The batch size is {batch_size!r}; give 'auto' or a whole number of at least 1.")
    return int(batch_size)
