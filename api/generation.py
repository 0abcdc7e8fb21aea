"""From prompts to answers: sampling parameters, which are checked against the server's caps, and the run."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from api.checks import ApiError, too_long
from api.fields import PARAMS
from api.options import ServerConfig
from api.prompts import Prompt
from api.reading import Reading
from api.replies import Caller, Run
from api.routes import Api, Events
from api.structure import structure_of
from sampling_params import SamplingParams


def generate(
    api: Api, fields: dict[str, Any], caller: Caller, prompts: Sequence[Prompt], shape: Callable[..., Run],
    default_max_tokens: int | None = None, reading: Reading | None = None, clamp: bool = False, waits: bool = True,
) -> dict[str, Any] | Events:  # fmt: skip
    """Answer prompts, with a reply of this shape, which makes a `Run`.

    The fields have the names of a chat's or of a completion's. Where neither the request nor the model says how many
    tokens of output there may be, `default_max_tokens` does, or else the context; with `clamp` that bounds what the
    request says, too. Whoever `waits` for a stream learns what the engine refuses before it begins.
    """
    if fields["stream_options"] is not None and not fields["stream"]:
        raise ApiError(400, "stream_options is only for stream: true", "stream_options")
    api.need_task("generate")
    api.check_priority(fields)
    lengths = [caller.virtual + len(ids) for _, ids in prompts]
    params = params_of(api, fields, lengths, default_max_tokens, reading, clamp, caller.virtual)
    if api.config.api_key and not api.config.share_prefix_cache:
        fields["cache_salt"] = api.board.tag("salt", caller.client, fields["cache_salt"])
    with contextlib.ExitStack() as stack:
        stack.enter_context(api.admitted(len(prompts) * params[0].num_sequences, caller))
        run = caller.job = shape(caller, fields, prompts, params, api.tokenizer, reading)
        news = run.news(api.client, api.config.request_timeout)
        stack.callback(news.close)
        first = [next(news)] if waits else []  # what the engine refuses is a 400 in a stream, too
        if not fields["stream"]:
            for _ in news:
                pass
            return run.whole()
        return Events(run.events(itertools.chain(first, news)), stack.pop_all().close)


def params_of(
    api: Api, fields: dict[str, Any], lengths: list[int], default: int | None, reading: Reading | None, clamp: bool,
    virtual: int,
) -> list[SamplingParams]:  # fmt: skip
    """Sampling parameters for prompts of these lengths; the output is bounded by what they leave of the context. So
    many tokens of each are `virtual`.

    What the request does not say, the model's generation_config.json does; for the tokens of output there is `default`.
    Where it does not say these, they are no more than as many whose log-probabilities may be kept.
    """
    limit = api.facts["max_model_len"]
    field = "max_tokens" if fields["max_completion_tokens"] is None else "max_completion_tokens"
    scores = scores_of(api, fields, lengths)
    if (asked := fields[field]) == 0 and not echoes(fields) and fields["prompt_logprobs"] is None:
        message = f"{field} is 0; it must be at least 1, or -1 for what is left, but for echo and prompt_logprobs"
        raise ApiError(400, message, field)
    if asked == 0 and scores["prompt_logprobs"] is None:  # the record has none without prompt_logprobs
        scores["prompt_logprobs"] = 0
    defaults = api.facts["default_sampling"]
    most = min(default or limit, defaults.get("max_tokens", limit))  # where the request does not say
    if asked == -1:  # all that is left
        asked, most = None, limit
    top, cap = scores["logprobs"], api.config.max_output_logprobs
    ranked = (fields["best_of"] or 0) > (fields["n"] or 1)  # by what then is kept, too
    kept = 0 if top is None and not ranked else (fields["best_of"] or fields["n"] or 1) * (1 + (top or 0))
    if asked is None and kept:
        most = max(1, min(most, cap // (kept * len(lengths))))
    among = f" ({virtual} are its adapter's)" if virtual else ""
    for length in lengths:
        if length + (asked != 0) > limit:
            raise too_long(limit, f"the prompt is too long: it has {length}{among}, which leaves none for the output")
        if asked and length + asked > limit and not (clamp or api.config.clamp_max_tokens):
            both = f"the prompt's {length}{among} and max_tokens {asked} are {length + asked}"
            raise too_long(limit, both, "max_tokens")
    left = [min(most if asked is None else asked, limit - length) for length in lengths]
    if (told := kept * sum(left)) > cap:
        message = f"prompts' max_tokens times n or best_of times logprobs + 1 are {told}; at most {cap}"
        raise ApiError(400, f"{message} (max_output_logprobs)", field)
    given = {param: fields[param] for param in PARAMS if fields[param] is not None}
    if not fields["use_beam_search"]:  # which takes the model's probabilities as they are
        given = {**defaults, **given}
    if given.get("bad_words"):
        given["bad_word_ids"] = api.tokenizer.bad_word_ids(given["bad_words"])
    try:
        given |= reading.params if reading else {"structured_outputs": structure_of(fields)}
        given |= scores
        of_length = {tokens: SamplingParams(**given | {"max_tokens": tokens}) for tokens in dict.fromkeys(left)}
        params = of_length[left[0]]
        params.check_vocabulary(api.facts["vocab_size"])
    except ValueError as error:
        raise ApiError(400, str(error), str(error).partition(" ")[0]) from None
    check_samples(params, len(left), sum(left), fields["stream"], api.config)
    return [of_length[tokens] for tokens in left]


def scores_of(api: Api, fields: dict[str, Any], lengths: list[int]) -> dict[str, int | None]:
    """How many log-probabilities the engine is asked for, as arguments of `SamplingParams`."""
    cap = api.facts["max_logprobs"]
    for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
        if (count := fields.get(name)) is not None and count > cap:
            raise ApiError(400, f"{name} is {count}; it must be from 0 to {cap} (max_logprobs)", name)
    top, of_prompt = fields["logprobs"], fields["prompt_logprobs"]
    if "top_logprobs" in fields:  # as in a chat
        if fields["top_logprobs"] and not top:
            raise ApiError(400, f"top_logprobs is {fields['top_logprobs']}; it needs logprobs: true", "top_logprobs")
        top = fields["top_logprobs"] or 0 if top else None
    if of_prompt is not None and fields["stream"]:
        raise ApiError(400, f"prompt_logprobs is {of_prompt}; it is not for stream: true", "prompt_logprobs")
    echoed = top if echoes(fields) else None
    wanted = [count for count in (of_prompt, echoed) if count is not None]
    told = sum((1 + count) * sum(lengths) * (fields["n"] or 1) for count in wanted)
    if told > (most := api.config.max_prompt_logprobs):
        name = "prompt_logprobs" if echoed is None else "logprobs"
        message = f"prompts' tokens times {name} times n are {told}; at most {most} (max_prompt_logprobs)"
        raise ApiError(400, message, name)
    return {"logprobs": top, "prompt_logprobs": max(wanted, default=None)}


def echoes(fields: dict[str, Any]) -> bool:
    """Whether the answers begin with the prompt and its log-probabilities; a chat echoes no more than a message."""
    return fields["echo"] and "top_logprobs" not in fields


def check_samples(params: SamplingParams, prompts: int, tokens: int, stream: bool, config: ServerConfig) -> None:
    """Refuse too many answers to so many prompts, whose answers have so many tokens together where each has one."""
    name = next(name for name in ("beam_width", "best_of", "n") if getattr(params, name) is not None)
    answers, tokens = prompts * params.num_sequences, tokens * params.num_sequences
    if answers > (cap := config.max_choices):
        raise ApiError(400, f"prompts times {name} is {answers}; at most {cap} (max_choices)", name)
    if tokens > (cap := config.max_output_tokens):
        message = f"prompts times {name} times max_tokens is {tokens}; at most {cap} (max_output_tokens)"
        raise ApiError(400, message, "max_tokens")
    if (listed := prompts * params.num_listed) > (cap := config.max_listed_tokens):
        message = f"prompts times listed token ids are {listed}; at most {cap} are allowed (max_listed_tokens)"
        raise ApiError(400, message)
    if stream and params.use_beam_search:
        raise ApiError(400, "stream is true; with use_beam_search it must be false", "stream")
    if stream and params.num_samples > params.n:
        message = f"stream is true; with best_of {params.best_of} above n, {params.n}, it must be false"
        raise ApiError(400, message, "stream")
