"""Text from a checkpoint in three lines, for those who need neither pipeline nor schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from workbench.core.errors import CapacityError, CheckpointError, EngineError, WorkloadError
from workbench.core.result import TokenLogprobs
from workbench.core.units import CPU_ONLY, STORED_INT4
from workbench.engine import Session, run
from workbench.engine.runnable import card_attends
from workbench.hardware import Machine
from workbench.models import ModelConfig, checkpoint, eos_token_ids
from workbench.models.generation import sampling_defaults
from workbench.pipeline import Pipeline, cpu, gpu, load, offload
from workbench.scenario import Memory, Scenario
from workbench.scheduler.base import LimitedScheduler, Scheduler, most_running
from workbench.scheduler.resource_aware import ResourceAware
from workbench.schedules import Sequential
from workbench.serving import fits
from workbench.serving.host_kernels import is_packed
from workbench.stages import attention, combine, experts, moe, out_proj, qkv, route
from workbench.workload import Request, Sampling, Workload
from workbench.workload.chat import ChatTemplate, Message, load_chat_template
from workbench.workload.request import SamplingOptions
from workbench.workload.stop_strings import text_of
from workbench.workload.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from workbench.jobs.generate import Finished

_ON_CPU = cpu(qkv, attention, out_proj, moe)
_EXPERTS_ON_CPU = gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts) >> load >> gpu(combine)
_PLACES = (gpu(qkv, attention, out_proj, moe), _ON_CPU)
_PLACES_BESIDE_A_CARD = (_PLACES[0], _EXPERTS_ON_CPU, _ON_CPU)
_BLOCK = 16
_SHORTEST = 2
_HALVINGS = 8
"""How often the KV cache may be halved before the next place is tried; prompts then wait for one another."""
MAX_TOKENS = 256
"""Most tokens of an answer to a request in the form of OpenAI's API, unless the request or the user says."""
TOGETHER = 64
"""Most requests that a session runs at once, unless it is told."""
_USUAL = 512
"""Tokens of a request for which a session's cache has room, times those that run at once, unless it is told."""


class Completion(str):
    """A generated text, and what it was made of.

    Attributes
    ----------
    tokens : tuple of int
        Generated tokens; the stop token, or those that spell a text at which it stopped, are the last.
    logprobs : tuple of TokenLogprobs
        Those of each token, where they were asked for.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]

    def __new__(cls, text: str, tokens: tuple[int, ...] = (), logprobs: tuple[TokenLogprobs, ...] = ()) -> Completion:
        made = super().__new__(cls, text)
        made.tokens = tokens
        made.logprobs = logprobs
        return made


class LLM:
    """Text from a checkpoint on this computer, with all weights resident.

    The model is on the GPU where it fits, else on the CPU; with a card, its experts alone are on the CPU where that is
    enough. The KV cache holds all requests of a call where that fits, else as many as fit. Another place, schedule or
    cache is a `Scenario`: `generate` makes one and calls `run`.

    Parameters
    ----------
    model : ModelConfig or str or Path
        A checkpoint from `wb.checkpoint`, or its folder.
    weights, kv : str, optional
        Precision of weights and KV cache, as in `Memory`; by default the model's own, to which weights in FP8 are
        converted; experts in MXFP4 are not, where their sizes are multiples of 64. "int8" and "int4" round the routed
        experts. A checkpoint in fp16 needs both, as "fp32" or "bf16".
    scheduler : Scheduler, optional
        By default `ResourceAware()`.
    device : "cpu" or "cuda", optional
        See `Machine.local`: with "cuda" the GPU is this computer's NVIDIA card, with "cpu" the CPU does all.

    Raises
    ------
    CheckpointError
        If the folder holds no checkpoint, or the model has no weights.
    CapacityError
        If the precision is unknown.
    EngineError
        If there is no such device.

    Attributes
    ----------
    model : ModelConfig
    tokenizer : Tokenizer
    defaults : dict
        What the checkpoint's ``generation_config.json`` says of ``top_k``, ``top_p``, ``min_p`` and
        ``repetition_penalty``; `generate` and `chat` take it where it is not given. The temperature is never taken from
        there: texts are greedy unless a temperature is given.

    Examples
    --------
    >>> import workbench as wb
    >>> llm = wb.LLM(wb.data_path("models/tiny-moe"))
    >>> for text in llm.generate(["sort:plmku=", "reverse:agjyxd="], stop_token_ids=llm.tokenizer.encode("\\n")):
    ...     print(text)
    klmpu
    dxyjga
    """

    def __init__(
        self,
        model: ModelConfig | str | Path,
        *,
        weights: str | None = None,
        kv: str | None = None,
        scheduler: Scheduler | None = None,
        device: str | None = None,
    ) -> None:
        self.model = model if isinstance(model, ModelConfig) else checkpoint(model)
        if self.model.path is None:
            raise CheckpointError(f"model {self.model.name!r} has no weights here; give wb.checkpoint(folder).")
        self.tokenizer = load_tokenizer(self.model)
        self.defaults = sampling_defaults(self.model)
        self._memory = Memory(1.0, _BLOCK, weights or _converted(self.model), kv)
        self._scheduler = scheduler or ResourceAware()
        if device not in (None, "cpu", "cuda"):
            raise EngineError(f"LLM has no device {device!r}; give 'cpu' or 'cuda'.")
        self._device = device

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as it was made: on another computer the checkpoint is read there."""
        given: dict[str, Any] = {"weights": self._memory.weights, "kv": self._memory.kv}
        given |= {"scheduler": self._scheduler, "device": self._device}
        return partial(LLM, self.model, **given), ()

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        max_tokens: int = 64,
        ignore_eos: bool = False,
        **sampling: Unpack[SamplingOptions],
    ) -> list[Completion]:
        """The texts that follow some prompts, in the order of the prompts.

        Parameters
        ----------
        prompts : sequence of str, or of sequences of int
            Texts, or token ids. A text gets the special tokens that the tokenizer adds to a prompt.
        max_tokens : int
            Most tokens of a text.
        ignore_eos : bool
            Go on after an end-of-sequence token of the checkpoint.
        **sampling
            Fields of `Sampling`: ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``repetition_penalty``,
            ``presence_penalty``, ``seed``, ``stop_token_ids``, ``stop``, ``logprobs``. What is left out is as in
            `defaults`, or else as in `Sampling`, which is greedy. The prompt with number n has the seed ``seed + n``.
            A text ends before its stop token, which may also be an end-of-sequence token of the checkpoint, and before
            the first of the texts in ``stop``.

        Raises
        ------
        WorkloadError
            If a prompt is empty or a text has no tokens, or an argument is out of range.
        CapacityError
            If the model does not fit this computer.
        """
        if isinstance(prompts, str):
            raise WorkloadError(f"prompts must be a list of texts, not one text; give [{prompts[:20]!r}].")
        if not len(prompts):
            return []
        given: dict[str, Any] = {**self.defaults, **sampling}
        how = Sampling(**given)
        how = replace(how, stop_token_ids=(*how.stop_token_ids, *(() if ignore_eos else self.eos)))
        requests = list[Request]()
        for number, prompt in enumerate(prompts):
            tokens = self.tokenizer.encode(prompt, special=True) if isinstance(prompt, str) else tuple(prompt)
            requests.append(Request(tokens, max_tokens, replace(how, seed=how.seed + number)))
        result = run(self.scenario(Workload.of(requests)), Sequential())
        logprobs = result.logprobs or ((),) * len(requests)
        return [self._completion(how, *made) for made in zip(result.tokens, logprobs, strict=True)]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        max_tokens: int = 64,
        ignore_eos: bool = False,
        **sampling: Unpack[SamplingOptions],
    ) -> list[Completion]:
        """The model's answers to one conversation, or to each of several.

        The checkpoint's chat template makes a prompt of each, with the special tokens that it has; none are added.

        Parameters
        ----------
        messages : sequence of mappings, or of sequences of mappings
            Messages such as ``{"role": "user", "content": "Hello"}`` of one conversation, or of each.
        max_tokens, ignore_eos, **sampling
            See `generate`.

        Raises
        ------
        CheckpointError
            If the checkpoint has no chat template.
        WorkloadError
            If its template refuses a conversation, or as `generate` does.
        """
        one = len(messages) > 0 and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if one else messages
        texts = [self.chat_template.render(each) for each in conversations]
        prompts = [self.tokenizer.encode(text) for text in texts]
        return self.generate(prompts, max_tokens=max_tokens, ignore_eos=ignore_eos, **sampling)

    def generate_file(
        self,
        requests: str | Path,
        *,
        out: str | Path,
        max_tokens: int = MAX_TOKENS,
        together: int = TOGETHER,
        kv_capacity: str | float | None = None,
        engines: int | None = None,
    ) -> Finished:
        """Finish a file of requests, whatever happens meanwhile.

        Each line of the file is a request in OpenAI's batch format: ``custom_id`` and a ``body`` with ``messages``, or
        with a ``prompt``. An answer is kept as soon as it is there. A job that was interrupted or killed goes on if it
        is begun again: nothing is lost, nothing is answered twice, and with weights and KV cache in fp32 the texts are
        the same. Malformed requests, and those that are too long or with which the engine fails, are set aside.

        Parameters
        ----------
        requests : str or Path
            File of the requests.
        out : str or Path
            File of the answers, in OpenAI's format. Beside it stand the requests that were set aside, in
            ``.errors.jsonl``, and while the job goes on ``.begun``.
        max_tokens : int
            Most tokens of an answer where the request says nothing.
        together : int
            Most requests that run at once.
        kv_capacity : str or float, optional
            See `open`.
        engines : int, optional
            So many engines as actors of Ray Data, on the machines of the cluster of RAY_ADDRESS or else on this one,
            each with the same room. All of them must reach `out`, beside which ``.parts`` stands until the end. By
            default the one engine of this process, without Ray.

        Raises
        ------
        WorkloadError
            If there is no such file, another job writes to `out`, or `out` holds something else.
        CapacityError
            If the model does not fit this computer.
        EngineError
            If there is no Ray for several engines.
        """
        from workbench.jobs.generate import finish
        from workbench.jobs.room import Room

        room = Room(together, kv_capacity)
        return finish(self, Path(requests), Path(out), max_tokens=max_tokens, room=room, engines=engines)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The checkpoint's chat template.

        Raises
        ------
        CheckpointError
            If it has none.
        """
        return load_chat_template(self.model)

    @property
    def longest(self) -> int:
        """Most tokens of a prompt and its text together: the last token is never read."""
        return self.model.max_position_embeddings + 1

    @property
    def fingerprint(self) -> str:
        """Name of the model and of its number formats: texts of the same one may stand together."""
        return f"{self.model.name}-{self._memory.weights or self.model.dtype}-{self._memory.kv or self.model.dtype}"

    def _completion(self, how: Sampling, tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]) -> Completion:
        return Completion(text_of(tokens, how, self.tokenizer), tokens, logprobs)

    def scenario(self, workload: Workload) -> Scenario:
        """The scenario in which `generate` serves a workload.

        Raises
        ------
        CapacityError
            If the model does not fit this computer.
        """
        tokens = sum(-(-int(held) // _BLOCK) * _BLOCK for held in workload.prompt_len + workload.output_len)
        return self._fitting(workload, self._scheduler, self._halved(tokens))

    def open(self, longest: int, *, together: int = TOGETHER, kv_capacity: str | float | None = None) -> Session:
        """Load the model once, for requests that come one by one, as those of a server do.

        Parameters
        ----------
        longest : int
            Most tokens of a request, prompt and output together.
        together : int
            Most requests that run at once.
        kv_capacity : str or float, optional
            Size of the KV cache, as in `Memory`; by default it has room for so many requests of 512 tokens, and for
            the longest, or for half as many where that does not fit, and so on.

        Raises
        ------
        CapacityError
            If the model does not fit this computer, or the cache not the longest request.
        ScenarioError
            If the model takes no request of that length.
        EngineError
            If a live run is under way in this process.

        Examples
        --------
        >>> import queue
        >>> llm = wb.LLM(wb.data_path("models/tiny-moe"))
        >>> told = queue.SimpleQueue()
        >>> with llm.open(longest=64) as session:
        ...     _ = session.ask(wb.Request(llm.tokenizer.encode("sort:plmku="), 5), told.put)
        ...     llm.tokenizer.decode([told.get().token for _ in range(5)])
        'klmpu'
        """
        return Session(self.planned(longest, together=together, kv_capacity=kv_capacity), Sequential())

    def planned(self, longest: int, *, together: int = TOGETHER, kv_capacity: str | float | None = None) -> Scenario:
        """The scenario of a session, see `open`; its workload is that for which memory is planned.

        Raises
        ------
        CapacityError, ScenarioError
            As `open` does.
        """
        if longest < _SHORTEST:
            raise WorkloadError(f"a request is a prompt and a token, so longest is at least 2, not {longest}.")
        workload = Workload.of([Request((0,) * (longest - 1), 1)] * together, name="the longest request of a session")
        scheduler = self._scheduler
        if isinstance(scheduler, LimitedScheduler):
            scheduler = replace(scheduler, max_running=int(min(together, most_running(scheduler))))
        usual = self._halved(max(longest, together * min(longest, _USUAL)))
        return self._fitting(workload, scheduler, usual if kv_capacity is None else (kv_capacity,))

    def _halved(self, tokens: int) -> Sequence[str | float]:
        """Sizes of a cache for so many tokens, for half as many, and so on."""
        whole = float(tokens * self.model.kv_bytes_per_token(self._memory.kv or self.model.dtype))
        return [whole / 2**halvings for halvings in range(_HALVINGS)]

    def _fitting(self, workload: Workload, scheduler: Scheduler, sizes: Sequence[str | float]) -> Scenario:
        """The first scenario that fits this computer, of the places of the model and these sizes of the cache."""
        usual = None if card_attends(self.model) else "cpu"
        machine = Machine.local(device=self._device or usual)
        refused = ""
        for place, size in product(self._places(machine), sizes):
            memory = replace(self._memory, kv_capacity=size)
            try:
                made = Scenario(place, self.model, machine, memory, workload, scheduler)
                found = fits(made, Sequential())
            except CapacityError as error:  # the cache is too small for the longest request
                refused = refused or str(error)
                continue
            if found:
                return made
            refused = refused or found.verdict
        raise CapacityError(refused)

    def _places(self, machine: Machine) -> Sequence[Pipeline]:
        """The places that the model may have, the fastest first; some experts that stay as stored are for the CPU."""
        if not machine.has_card:
            return _PLACES
        stored = self.model.expert_dtype or ""
        form, _ = STORED_INT4.get(stored, (stored, None))
        as_stored = form in CPU_ONLY and self._memory.weights is None
        return _PLACES_BESIDE_A_CARD[1:] if as_stored else _PLACES_BESIDE_A_CARD

    @cached_property
    def eos(self) -> tuple[int, ...]:
        """End-of-sequence tokens of the checkpoint; none if it names none."""
        try:
            return eos_token_ids(self.model)
        except CheckpointError:
            return ()


def _converted(model: ModelConfig) -> str | None:
    """The precision to which quantised weights are converted; None if the kernels compute with them as they are."""
    held = model.expert_dtype in ("mxfp4", *STORED_INT4) and model.other_dtype is None and is_packed(model)
    return model.dtype if (model.expert_dtype or model.other_dtype) and not held else None
