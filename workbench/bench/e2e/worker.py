"""A process that holds one inference engine and serves batches of requests on command.

It is run as a script, by the Python interpreter of the engine's own environment, where the workbench need not be
installed: it imports nothing but the standard library and that engine. Each line of its input is a JSON object
``{"prompts": [[token id]], "new": int}``, each line of its output one with the seconds, core-seconds and tokens; the
first tells the engine's version.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any

Prompts = Sequence[Sequence[int]]
Answer = tuple[float, float, list[list[int]]]
"""Seconds, core-seconds, and the new tokens of every request."""


def _timed(generate: Callable[[], list[list[int]]]) -> Answer:
    begin = time.perf_counter()
    spent = time.process_time()
    tokens = generate()
    return time.perf_counter() - begin, time.process_time() - spent, tokens


class Workbench:
    """This engine with all weights resident; the model is loaded before the clock starts.

    Parameters
    ----------
    folder : str
    weights : str
        Precision of the weights, as in `Memory`.
    """

    def __init__(self, folder: str, weights: str) -> None:
        import workbench as wb

        self.version = "here"
        self._wb = wb
        self._llm = wb.LLM(folder, weights=weights, device="cpu")

    def __call__(self, prompts: Prompts, new: int) -> Answer:
        from workbench.core.result import Source
        from workbench.engine.engine import Engine
        from workbench.schedules import Sequential
        from workbench.serving import prepare
        from workbench.serving.loop import serve

        workload = self._wb.Workload.of([self._wb.Request(tuple(prompt), new) for prompt in prompts])
        prepared = prepare(self._llm.scenario(workload), Sequential())
        engine = Engine(prepared)
        try:
            seconds, spent, _ = _timed(lambda: (serve(prepared, engine, Source.MEASURED), [])[1])
            return seconds, spent, [list(tokens) for tokens in engine.generated]
        finally:
            engine.close()


class Transformers:
    """Transformers in bf16: batches of all requests at once, padded on the left, or its continuous batching.

    Parameters
    ----------
    folder : str
    way : str
        "eager" or "grouped_mm", which compute the experts of such a batch, or "continuous".
    """

    def __init__(self, folder: str, way: str) -> None:
        self._transformers: Any = import_module("transformers")
        self._torch: Any = import_module("torch")
        self.version = version("transformers")
        self._way = way
        experts = "grouped_mm" if way == "continuous" else way
        self._model = self._transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=self._torch.bfloat16, experts_implementation=experts
        ).eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0

    def __call__(self, prompts: Prompts, new: int) -> Answer:
        generate = self._continuous if self._way == "continuous" else self._padded
        return _timed(lambda: generate(prompts, new))

    def _padded(self, prompts: Prompts, new: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = self._torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        there = self._torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        how = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
        with self._torch.inference_mode():
            made = self._model.generate(ids, attention_mask=there, **how)
        tokens: list[list[int]] = made[:, longest:].tolist()
        return tokens

    def _continuous(self, prompts: Prompts, new: int) -> list[list[int]]:
        config = self._transformers.GenerationConfig(
            max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        configs: Any = import_module("transformers.generation.configuration_utils")
        batching = configs.ContinuousBatchingConfig(block_size=256, num_blocks=96, max_batch_tokens=512)
        found = self._model.generate_batch(
            [list(prompt) for prompt in prompts], generation_config=config, continuous_batching_config=batching
        )
        return [list(found[key].generated_tokens) for key in sorted(found, key=lambda key: int(key.split("_")[-1]))]


class Vllm:
    """vLLM's CPU build in bf16, in this process."""

    def __init__(self, folder: str, _: str) -> None:
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2"}
        self._vllm: Any = import_module("vllm")
        self.version = self._vllm.__version__
        self._llm = self._vllm.LLM(
            folder,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            enable_prefix_caching=False,
        )

    def __call__(self, prompts: Prompts, new: int) -> Answer:
        how = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False
        )
        given: Any = [{"prompt_token_ids": list(prompt)} for prompt in prompts]

        def generate() -> list[list[int]]:
            return [list(one.outputs[0].token_ids) for one in self._llm.generate(given, how, use_tqdm=False)]

        return _timed(generate)


class LlamaCpp:
    """llama.cpp through llama-cpp-python, all requests as sequences of one context.

    Parameters
    ----------
    path : str
        A GGUF file.
    """

    def __init__(self, path: str, _: str) -> None:
        self._cpp: Any = import_module("llama_cpp")
        self._np: Any = import_module("numpy")
        self.version = version("llama-cpp-python")
        self._cpp.llama_backend_init()
        how = self._cpp.llama_model_default_params()
        how.use_mmap = False
        self._model = self._cpp.llama_model_load_from_file(path.encode(), how)
        if not self._model:
            raise RuntimeError(f"llama.cpp does not read {path}")
        self._tokens = self._cpp.llama_vocab_n_tokens(self._cpp.llama_model_get_vocab(self._model))

    def __call__(self, prompts: Prompts, new: int) -> Answer:
        how = self._cpp.llama_context_default_params()
        how.n_ctx = sum(map(len, prompts)) + new * len(prompts)
        how.n_seq_max = len(prompts)
        how.kv_unified = True
        how.n_batch = 2048
        how.n_threads = how.n_threads_batch = len(os.sched_getaffinity(0))
        context = self._cpp.llama_init_from_model(self._model, how)
        if not context:
            raise RuntimeError("llama.cpp made no context")
        batch = self._cpp.llama_batch_init(how.n_batch, 0, 1)
        try:
            return _timed(lambda: self._generate(context, batch, how.n_batch, prompts, new))
        finally:
            self._cpp.llama_batch_free(batch)
            self._cpp.llama_free(context)

    def _generate(self, context: Any, batch: Any, most: int, prompts: Prompts, new: int) -> list[list[int]]:
        made: list[list[int]] = [[] for _ in prompts]
        rows = [
            (token, place, number, place + 1 == len(prompt))
            for number, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        for step in range(new):
            for begin in range(0, len(rows), most):
                self._decode(context, batch, rows[begin : begin + most], made)
            places = [len(prompt) + step for prompt in prompts]
            rows = [(made[number][-1], place, number, True) for number, place in enumerate(places)]
        return made

    def _decode(self, context: Any, batch: Any, rows: Sequence[tuple[int, int, int, bool]], made: Any) -> None:
        """Compute rows (token, position, request, whether it emits), and choose the tokens of those that emit."""
        batch.n_tokens = len(rows)
        for row, (token, place, number, emits) in enumerate(rows):
            batch.token[row] = token
            batch.pos[row] = place
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = number
            batch.logits[row] = emits
        if self._cpp.llama_decode(context, batch):
            raise RuntimeError("llama.cpp could not compute a batch")
        for row, (_, _, number, emits) in enumerate(rows):
            if emits:
                logits = self._cpp.llama_get_logits_ith(context, row)
                made[number].append(int(self._np.ctypeslib.as_array(logits, (self._tokens,)).argmax()))


ENGINES = {"workbench": Workbench, "transformers": Transformers, "vllm": Vllm, "llama.cpp": LlamaCpp}


def main() -> None:
    """Serve what is asked for until the input ends; what engines print goes to the standard error stream."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(record: dict[str, Any]) -> None:
        print(json.dumps(record), file=output, flush=True)

    engine: Any = ENGINES[sys.argv[1]](sys.argv[2], sys.argv[3])
    tell({"version": engine.version})
    for line in sys.stdin:
        asked = json.loads(line)
        seconds, spent, tokens = engine(asked["prompts"], asked["new"])
        tell({"seconds": seconds, "core_seconds": spent, "tokens": tokens})


if __name__ == "__main__":
    main()
