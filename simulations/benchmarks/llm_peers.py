"""The runtimes that are compared, each in a process of its own that answers over a pipe.

The process is this very file, run by the Python that has the runtime installed; nothing but the standard library is
imported before a runtime is asked for. One JSON object a line goes in, one comes out:

    {"do": "generate", "prompt": [ids], "tokens": n}  -> {"prefill": time, "decode": time, "ids": [...]}
    {"do": "steps", "prompt": [ids], "tokens": n}     -> {"forward": [seconds], "draw": [seconds]}   (ours only)
    {"do": "perplexity", "ids": [...]}                -> {"nll": nats per token}
    {"do": "memory"}                                  -> {"peak": bytes, "pss": bytes, "private": bytes}

A time is {"wall": seconds, "cpu": seconds}. ``prefill`` ends when the prompt's last logits are there; ``decode`` holds
``tokens`` draws and one step less. No runtime stops at an end-of-text token.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

Facts = dict[str, Any]
CONTEXT = 1024


class Peer(Protocol):
    """A runtime with a model loaded."""

    def generate(self, prompt: Sequence[int], tokens: int) -> Facts:
        """Read a prompt into an empty cache and write so many tokens."""

    def negative_log_likelihood(self, ids: Sequence[int]) -> float:
        """Return the mean negative log-likelihood of all ids but the first, in nats."""


class Stopwatch:
    """Wall and processor time at every call; it can stand in for a clock."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []

    def __call__(self) -> float:
        """Take the time, and return the wall clock's."""
        self.marks.append((time.perf_counter(), time.process_time()))
        return self.marks[-1][0]

    def between(self, first: int, last: int) -> dict[str, float]:
        """Return what passed between two calls."""
        start, end = self.marks[first], self.marks[last]
        return {"wall": end[0] - start[0], "cpu": end[1] - start[1]}

    def facts(self, ids: Sequence[int]) -> Facts:
        """Return the result of a generation timed by three calls."""
        return {"prefill": self.between(0, 1), "decode": self.between(1, -1), "ids": list(ids)}


class EdgeDuet:
    """Our runtime, through the same call an application uses."""

    def __init__(self, model: str, threads: int, sampler: str) -> None:
        from edgeduet_client.llm.local_model import LocalModel
        from edgeduet_client.llm.speculation.options import SpeculationOptions

        self._sampler, _, mode = sampler.partition(" ")
        speculation = SpeculationOptions.from_mapping({"mode": mode}) if mode else None
        self._model = LocalModel.open(model, threads=threads, speculation=speculation)

    def generate(self, prompt: Sequence[int], tokens: int) -> Facts:
        """See :class:`Peer`."""
        from edgeduet_client.llm.generate import TextPiece

        watch = Stopwatch()
        ids: list[int] = []
        for event in self._model.generate(prompt, self._request(tokens), clock=watch):
            if isinstance(event, TextPiece):
                ids += event.ids
        return watch.facts(ids)

    def steps(self, prompt: Sequence[int], tokens: int) -> Facts:
        """Return the processor time of every forward step and of everything that makes its logits a token."""
        from edgeduet_client.llm.draw import generator
        from edgeduet_client.llm.generate import Sampling, draw_next
        from edgeduet_client.llm.plan import make_plan
        from edgeduet_client.llm.request import GenerationRequest
        from edgeduet_client.llm.sampler_state import initial_state

        # As an application asks, without a ban on ending; this loop goes on after an end-of-text token.
        request = GenerationRequest(sampler=self._sampler, seed=0, gate="off")
        plan = make_plan(request, self._model.vocabulary, prompt_ids=prompt)
        sampling = Sampling(plan, initial_state(plan), generator(0))
        cache = self._model.new_cache()
        outcome = self._model.session.prefill(prompt, cache)
        generated: list[int] = []
        times: dict[str, list[float]] = {"forward": [], "draw": []}
        while len(generated) < tokens:
            before = time.process_time()
            token = draw_next(outcome, generated, sampling).token
            between = time.process_time()
            outcome = self._model.session.forward((token,), cache)
            times["draw"].append(between - before)
            times["forward"].append(time.process_time() - between)
            generated.append(token)
        return times

    def negative_log_likelihood(self, ids: Sequence[int]) -> float:
        """See :class:`Peer`."""
        logits = self._model.session.prefill(ids, self._model.new_cache(), rows=range(len(ids) - 1)).logits
        return _loss(logits, ids)

    def _request(self, tokens: int) -> Any:
        from edgeduet_client.llm.request import GenerationRequest

        # As many tokens at least as at most: no end before.
        return GenerationRequest(sampler=self._sampler, min_tokens=tokens, max_tokens=tokens, seed=0, gate="off")


class Genai:
    """onnxruntime-genai: its own C++ loop over its own graph; with ``ngram``, its own lookup drafts."""

    def __init__(self, model: str, threads: int, drafts: str = "") -> None:
        import onnxruntime_genai

        self._drafts = drafts
        self._library = onnxruntime_genai
        config = onnxruntime_genai.Config(model)
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        self._model = onnxruntime_genai.Model(config)

    def generate(self, prompt: Sequence[int], tokens: int) -> Facts:
        """See :class:`Peer`."""
        generator = self._generator(len(prompt) + tokens)
        watch = Stopwatch()
        watch()
        generator.append_tokens(list(prompt))
        watch()
        for _ in range(tokens):
            generator.generate_next_token()
        watch()
        return watch.facts([int(token) for token in generator.get_sequence(0)[len(prompt) :]])

    def negative_log_likelihood(self, ids: Sequence[int]) -> float:
        """See :class:`Peer`."""
        import numpy as np

        generator = self._generator(len(ids) + 1)
        rows = []
        for start in range(0, len(ids) - 1, 64):
            generator.append_tokens(list(ids[start : min(start + 64, len(ids) - 1)]))
            rows.append(np.array(generator.get_output("logits"))[0])
        return _loss(np.concatenate(rows), ids)

    def _generator(self, length: int) -> Any:
        params = self._library.GeneratorParams(self._model)
        params.set_search_options(do_sample=False, min_length=length, max_length=length)
        if self._drafts == "ngram":
            params.set_speculative_options(
                ngram_size=3, max_draft_tokens=4, ngram_chained_lookup=True, min_adaptive_k=2, cooldown=True
            )
        return self._library.Generator(self._model, params)


class LlamaCpp:
    """llama.cpp through llama-cpp-python: its usual generator, greedy; with ``lookup``, its lookup drafts."""

    def __init__(self, model: str, threads: int, drafts: str = "") -> None:
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        self._settings = {"n_ctx": CONTEXT, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
        self._class, self._path = llama_cpp.Llama, model
        # Two tokens: what its documentation advises on processors.
        drafter = LlamaPromptLookupDecoding(num_pred_tokens=2) if drafts == "lookup" else None
        self._model = llama_cpp.Llama(model, draft_model=drafter, **self._settings)

    def generate(self, prompt: Sequence[int], tokens: int) -> Facts:
        """See :class:`Peer`."""
        self._model.reset()
        watch = Stopwatch()
        watch()
        written: Iterator[int] = self._model.generate(list(prompt), temp=0.0)
        ids = [next(written)]
        watch()
        ids += [next(written) for _ in range(tokens - 1)]
        watch()
        return watch.facts(ids)

    def negative_log_likelihood(self, ids: Sequence[int]) -> float:
        """See :class:`Peer`."""
        model = self._class(self._path, logits_all=True, **self._settings)
        model.eval(list(ids[:-1]))
        return _loss(model.scores[: len(ids) - 1], ids)


class Transformers:
    """transformers, float32, not compiled, in the leanest greedy loop; with ``lookup``, its assisted generation."""

    def __init__(self, model: str, threads: int, drafts: str = "") -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch, self._drafts = torch, drafts
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def generate(self, prompt: Sequence[int], tokens: int) -> Facts:
        """See :class:`Peer`."""
        torch = self._torch
        with torch.inference_mode():
            watch = Stopwatch()
            watch()
            output = self._model(torch.tensor([list(prompt)]), use_cache=True, logits_to_keep=1)
            watch()
            if self._drafts == "lookup":
                return self._assisted(prompt, tokens, watch)
            ids = [int(output.logits[0, -1].argmax())]
            while len(ids) < tokens:
                newest = torch.tensor([ids[-1:]])
                output = self._model(newest, past_key_values=output.past_key_values, use_cache=True)
                ids.append(int(output.logits[0, -1].argmax()))
            watch()
        return watch.facts(ids)

    def _assisted(self, prompt: Sequence[int], tokens: int, watch: Stopwatch) -> Facts:
        """Prompt lookup in its own loop, which reads the prompt once more: that time is taken off."""
        started = Stopwatch()
        started()
        output = self._model.generate(
            self._torch.tensor([list(prompt)]),
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            prompt_lookup_num_tokens=4,
        )
        started()
        took, read = started.between(0, 1), watch.between(0, 1)
        ids = [int(token) for token in output[0, len(prompt) :]]
        return {"prefill": read, "decode": {clock: took[clock] - read[clock] for clock in took}, "ids": ids}

    def negative_log_likelihood(self, ids: Sequence[int]) -> float:
        """See :class:`Peer`."""
        with self._torch.inference_mode():
            logits = self._model(self._torch.tensor([list(ids[:-1])])).logits[0].numpy()
        return _loss(logits, ids)


def open_peer(kind: str, model: str, threads: int) -> Peer:
    """Load a runtime of this kind.

    ``edgeduet SAMPLER [fast|exact]``, ``genai [ngram]``, ``llama.cpp [lookup]``, ``transformers [lookup]``.
    """
    name, _, manner = kind.partition(" ")
    if name == "edgeduet":
        return EdgeDuet(model, threads, manner)
    return {"genai": Genai, "llama.cpp": LlamaCpp, "transformers": Transformers}[name](model, threads, manner)


def memory() -> dict[str, int]:
    """Return bytes of this process: highest resident size so far, proportional and private size now."""
    kilobytes: dict[str, int] = {}
    for path in ("/proc/self/status", "/proc/self/smaps_rollup"):
        with open(path) as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if value.strip().endswith("kB"):
                    kilobytes[name] = int(value.split()[0])
    return {
        "peak": 1024 * kilobytes["VmHWM"],
        "pss": 1024 * kilobytes["Pss"],
        "private": 1024 * (kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]),
    }


def quantise_to_8_bits(source: str, target: str) -> None:
    """Write a GGUF file's weights as Q8_0; llama.cpp does it."""
    import ctypes

    import llama_cpp

    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype, settings.allow_requantize, settings.nthread = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, True, 1
    if llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(settings)) != 0:
        raise SystemExit(f"llama.cpp cannot quantise {source}")


def _loss(logits: Any, ids: Sequence[int]) -> float:
    import numpy as np

    z = np.array(logits, np.float64)
    z -= z.max(axis=1, keepdims=True)
    return float((np.log(np.exp(z).sum(axis=1)) - z[np.arange(len(z)), list(ids[1:])]).mean())


def versions() -> dict[str, str]:
    """Return the versions of what this process has loaded."""
    known = ("numpy", "onnxruntime", "onnxruntime_genai", "llama_cpp", "torch", "transformers")
    return {name: sys.modules[name].__version__ for name in known if name in sys.modules}


def main() -> None:
    """Answer until the pipe is closed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind")
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quantise-to", metavar="FILE", help="write MODEL as Q8_0 and end")
    options = parser.parse_args()
    if options.quantise_to:
        quantise_to_8_bits(options.model, options.quantise_to)
        return
    # What libraries print must not get between the answers.
    answers, sys.stdout = sys.stdout, sys.stderr

    def tell(facts: Facts) -> None:
        answers.write(json.dumps(facts) + "\n")
        answers.flush()

    started = time.process_time()
    peer = open_peer(options.kind, options.model, options.threads)
    tell({"ready": True, "cpu": time.process_time(), "load_cpu": time.process_time() - started, "versions": versions()})
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "memory":
            tell(memory())
        elif asked["do"] == "perplexity":
            tell({"nll": peer.negative_log_likelihood(asked["ids"])})
        elif asked["do"] == "steps":
            tell(peer.steps(asked["prompt"], asked["tokens"]) if isinstance(peer, EdgeDuet) else {})
        else:
            tell({**peer.generate(asked["prompt"], asked["tokens"]), "cpu": time.process_time()})


if __name__ == "__main__":
    main()
