"""The methods of `LLM` for engines that do not generate: embeddings, labels and scores of prompts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from tqdm import tqdm

from observe.logs import warn_once
from outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    cosine,
    numbers,
    numbers_by_token,
)
from plan import EngineCoreRequest
from processes.client import EngineCoreClient, InprocClient, Stream, check_accepted
from sampling_params import NO_SAMPLING, POOLING_TASKS, PoolingParams
from text.prompts import CUT, Prompt, listed, opening, pair_parts, read_prompt
from tokenizer import Tokenizer


def drop(client: EngineCoreClient, request_ids: Iterable[str]) -> None:
    """Give requests up, and finish a step that has begun before, if the engine is in this process."""
    for request_id in request_ids:
        client.abort(request_id)
    while isinstance(client, InprocClient) and client.step():
        pass


def scored(
    a: PoolingRequestOutput[PoolingOutput], b: PoolingRequestOutput[PoolingOutput]
) -> PoolingRequestOutput[ScoringOutput]:
    """The cosine of two embeddings; NaN if one of them was given up."""
    error = a.error or b.error
    score = math.nan if error else cosine(a.outputs.data, b.outputs.data)
    name, ids = f"{a.request_id}_{b.request_id}", a.prompt_token_ids + b.prompt_token_ids
    return PoolingRequestOutput(name, ScoringOutput(score), ids, error is None, error)


class PoolingFaces:
    """The methods of `LLM` that make a vector of each prompt."""

    llm_engine: Any
    tokenizer: Tokenizer
    ids: Iterator[str]  # for requests, unused ones

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | list[PoolingParams] | None = None,
        use_tqdm: bool = True,
        pooling_task: str | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        prompt_name: str | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """A vector of each prompt, `outputs.data`: its embedding, or what the model's classification head says.

        Args:
            prompts, use_tqdm: see `generate`.
            pooling_params: for all of them, or for each.
            pooling_task: what is expected of each prompt: "embed", "classify" or "score", or of each of its tokens:
                "token_embed" or "token_classify", which make `outputs.data` a list of vectors. None takes what this
                engine does.
            tokenization_kwargs: may have `truncate_prompt_tokens`, as in vLLM, which cuts the end of a longer prompt;
                -1 keeps what the context holds. Without it a prompt that is too long is refused; but see docs/api.md.
            prompt_name: of the model's prompt that goes before each text to embed; "" is none, None the default.

        Raises:
            ValueError: the task of this engine is to generate, or another than `pooling_task`; or see `generate`.
        """
        if pooling_task is not None:
            able = tuple(task for task, does in POOLING_TASKS.items() if pooling_task in does)
            if not able:
                raise ValueError(f"pooling_task is {pooling_task!r:.80}; the tasks of engines do {POOLING_TASKS}")
            self._check_task("encode", able)
        ids = self._pooled_ids(listed(prompts), self._kept(tokenization_kwargs), prompt_name)
        return self._pool(ids, pooling_params, use_tqdm, pooling_task)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | list[PoolingParams] | None = None,
        use_tqdm: bool = True,
        tokenization_kwargs: dict[str, Any] | None = None,
        prompt_name: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each prompt; see `encode`.

        Raises:
            ValueError: the task of this engine is not to embed, or see `generate`.
        """
        self._check_task("embed", ("embed",))
        results = self.encode(prompts, pooling_params, use_tqdm, "embed", tokenization_kwargs, prompt_name)
        return [one.having(EmbeddingOutput(one.outputs.data)) for one in results]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | list[PoolingParams] | None = None,
        use_tqdm: bool = True,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """The probability of each label for each prompt.

        Raises:
            ValueError: the model has no classification head, or see `generate`.
        """
        self._check_task("classify", ("score", "classify"))
        results = self.encode(prompts, pooling_params, use_tqdm, "classify", tokenization_kwargs)
        return [one.having(ClassificationOutput(one.outputs.data)) for one in results]

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | list[PoolingParams] | None = None,
        use_tqdm: bool = True,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The rewards that a reward model gives each token, as vLLM does: of an outcome, the last token's counts."""
        return self.encode(prompts, pooling_params, use_tqdm, "token_classify", tokenization_kwargs)

    def score(
        self,
        text_1: str | list[str],
        text_2: str | list[str],
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        tokenization_kwargs: dict[str, Any] | None = None,
        prompt_name: str | None = None,
        instruction: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Score how well each of `text_2` goes with its partner in `text_1`, or with the only one there.

        An embedder's score is the cosine of the two embeddings, and a result has the tokens of both texts. A classifier
        with one label scores both as one prompt: `prompt_name` is for the first. An `instruction` replaces the prompt.

        Raises:
            ValueError: the numbers of texts differ, the task of this engine is another one, or see `generate`.
        """
        self._check_task("score", ("embed", "score"))
        for name, texts in (("text_1", text_1), ("text_2", text_2)):
            if not isinstance(texts, str | list | tuple) or not all(isinstance(text, str) for text in texts):
                raise ValueError(f"{name} is {texts!r:.80}; it must be a string or a list of strings")
        if not isinstance(pooling_params, PoolingParams | None):
            raise ValueError(f"pooling_params is {pooling_params!r:.80}; it must be PoolingParams or None")
        first, second = ([text] if isinstance(text, str) else [*text] for text in (text_1, text_2))
        if not first or len(first) not in (1, len(second)):
            raise ValueError(f"text_1 has {len(first)} texts for {len(second)} of text_2; it must have as many, or 1")
        first, keep = first * (len(second) // len(first)), self._kept(tokenization_kwargs)
        facts, encoder = self.llm_engine.client.facts, self.tokenizer
        if facts["task"] == "score":
            before = opening(facts, prompt_name) if instruction is None else ""
            pairs = [pair_parts(facts, encoder, a, b, before, instruction) for a, b in zip(first, second, strict=True)]
            encoded = [encoder.encode_parts(pair, keep, "right") for pair in pairs]
            if keep is not None and (least := max(len(ids) for ids, _, _ in encoded)) > keep:
                raise ValueError(f"truncate_prompt_tokens is {keep}; it must be at least {least} for these texts")
            params, typed = pooling_params or PoolingParams(), facts["token_types"] > 1
            pooling = [dataclasses.replace(params, second_text=at) if typed else params for _, _, at in encoded]
            results = self._pool([ids for ids, _, _ in encoded], pooling, use_tqdm, "score")
            return [one.having(ScoringOutput(*one.outputs.data or [math.nan])) for one in results]  # it has one label
        if instruction is not None:
            raise ValueError(f"instruction is {instruction!r:.80}; it is for models that score pairs, not embedders")
        if pooling_params is not None and pooling_params.use_activation is False:
            raise ValueError("use_activation is False; it is for models that score pairs, an embedder's are cosines")
        distinct = list(dict.fromkeys(first + second))
        ids = self._pooled_ids(distinct, keep, prompt_name)
        vectors = dict(zip(distinct, self._pool(ids, pooling_params, use_tqdm, "embed"), strict=True))
        return [scored(vectors[a], vectors[b]) for a, b in zip(first, second, strict=True)]

    def _check_awake(self) -> None:
        if any(self.llm_engine.client.utility("is_sleeping").values()):
            raise ValueError("the engine sleeps; call wake_up() first")

    def _check_task(self, method: str, tasks: tuple[str, ...]) -> None:
        if (task := self.llm_engine.client.facts["task"]) not in tasks:
            raise ValueError(f"{method} is for engines whose task is {' or '.join(tasks)}; this one's is {task!r}")

    def _kept(self, tokenization_kwargs: dict[str, Any] | None) -> int | None:
        """Tokens of a prompt that are kept; None: all."""
        if not isinstance(tokenization_kwargs, dict | None):
            raise ValueError(f"tokenization_kwargs is {tokenization_kwargs!r:.80}; it must be a dict or None")
        options, limit = dict(tokenization_kwargs or {}), self.llm_engine.client.facts["max_model_len"]
        keep = options.pop("truncate_prompt_tokens", None)
        if options:
            raise ValueError(f"tokenization_kwargs has {next(iter(options))!r:.80}; known: truncate_prompt_tokens")
        if keep is None:
            return None
        if type(keep) is not int or keep == 0 or not -1 <= keep <= limit:
            raise ValueError(f"truncate_prompt_tokens is {keep!r:.80}; it must be -1, or from 1 to {limit}")
        return limit if keep == -1 else keep

    def _pooled_ids(self, prompts: Sequence[Prompt], keep: int | None, name: str | None = None) -> list[list[int]]:
        """The tokens of each prompt, texts with the model's own prompt in front; of a longer one, the first `keep`."""
        facts, tokenizer = self.llm_engine.client.facts, self.tokenizer
        before, cuts = opening(facts, name), keep is None and facts["cuts_texts"]
        keep = facts["max_model_len"] if cuts else keep
        texts = iter(tokenizer.encode_batch([before + item for item in prompts if isinstance(item, str)]))
        token_ids = []
        for item in prompts:
            if isinstance(item, dict) and isinstance(item.get("prompt"), str) and "prompt_token_ids" not in item:
                item = item | {"prompt": before + item["prompt"]}
            text, ids, _ = (before + item, next(texts), "") if isinstance(item, str) else read_prompt(item, tokenizer)
            if keep is not None and len(ids) > keep and not (cuts and text is None):
                if cuts:
                    warn_once(CUT.format(keep))
                ids = ids[:keep] if text is None else tokenizer.encode_cut((text,), keep, "right")[0]
            token_ids.append(ids)
        return token_ids

    def _pool(
        self, prompt_ids: list[list[int]], params: PoolingParams | list[PoolingParams] | None, use_tqdm: bool,
        task: str | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:  # fmt: skip
        """Have the engine make a vector of each prompt, or what `task` says; raises what `generate` does."""
        params = PoolingParams() if params is None else params
        column = params if isinstance(params, list) else [params] * len(prompt_ids)
        if others := [param for param in column if not isinstance(param, PoolingParams)]:
            raise ValueError(f"pooling_params has {others[0]!r:.80}; it must be PoolingParams, a list of them, or None")
        if len(column) != len(prompt_ids):
            raise ValueError(f"pooling_params has {len(column)} entries for {len(prompt_ids)} prompts")
        if task and (tasks := {param.task for param in column} - {None, task}):
            raise ValueError(f"pooling_params has the task {tasks.pop()!r:.80}; it must be {task!r} here, or None")
        column = [dataclasses.replace(param, task=task or param.task) for param in column]
        self._check_awake()
        results: dict[str, PoolingRequestOutput[PoolingOutput]] = {}
        live: dict[str, PoolingParams] = {}
        stream, client = Stream(), self.llm_engine.client
        try:
            for ids, param in zip(prompt_ids, column, strict=True):
                request = EngineCoreRequest(next(self.ids), ids, NO_SAMPLING, pooling=param)
                client.add_request(request, stream)
                live[request.request_id] = param
                results[request.request_id] = PoolingRequestOutput(request.request_id, PoolingOutput([]), ids, False)
            with tqdm(total=len(live), desc="Pooling", unit="request", disable=not use_tqdm) as bar:
                while live:
                    output = client.get_output(stream)
                    check_accepted(output, begun=False)
                    done, param = results[output.request_id], live.pop(output.request_id)
                    done.error, done.finished = output.error, output.error is None
                    if output.pooled:
                        count = len(done.prompt_token_ids)
                        numbers_of = partial(numbers_by_token, count=count) if param.by_token else numbers
                        done.outputs.data = numbers_of(output.pooled)
                    bar.update()
        finally:  # as in `generate`
            drop(client, live)
        return list(results.values())
