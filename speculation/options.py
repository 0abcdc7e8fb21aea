"""The options of `--speculative-config`; nothing here needs torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

# Methods by which a model makes the drafts, and whether the option `model` names it.
MODELS = {"mtp": False, "draft_model": True, "eagle": True, "eagle3": True}
METHODS = ("ngram", "suffix", *MODELS)
MOST_DRAFTS = 32
MOST_NGRAM = 16  # tokens that a look-up compares
SUFFIX_DRAFTS = 24  # of `suffix`, if no number is given, as in vLLM
# vLLM's options that change no token, and for which Manta has a way of its own: it measures when drafts pay, a draft
# model has the model's ranks and length, and a draft is verified by the token that the model samples.
IGNORED = {
    "acceptance_method", "attention_backend", "code_revision", "disable_by_batch_size", "disable_log_stats",
    "disable_logprobs", "disable_padded_drafter_batch", "draft_sample_method", "draft_tensor_parallel_size",
    "enforce_eager", "max_model_len", "moe_backend", "posterior_alpha", "posterior_threshold",
    "rejection_sample_method", "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor",
    "suffix_decoding_max_tree_depth", "suffix_decoding_min_token_prob", "token_acceptance_method",
    "typical_acceptance_sampler_posterior_alpha", "typical_acceptance_sampler_posterior_threshold",
    "use_local_argmax_reduction",
}  # fmt: skip
# Fields of the config.json of a head that Speculators saved (https://github.com/vllm-project/speculators).
SPECULATORS, SPECULATORS_METHOD = "speculators_config", "speculators_model_type"
SPECULATORS_LAYER = "transformer_layer_config"


@dataclass(frozen=True)
class SpeculativeConfig:
    """Options of speculative decoding, by vLLM's names.

    Attributes:
        num_speculative_tokens: drafts that a step verifies for a sequence, at most.
        method: `ngram` proposes what followed the latest tokens when they came before, in the prompt or the output,
            `suffix` also when they came in another request of the client. `mtp` asks the head that the model's own
            checkpoint has, `draft_model` a smaller model with the same tokenizer, and `eagle` and `eagle3` a head that
            was made for the model. Without a method, a `model` is an eagle3 or eagle if its name says so, else a
            draft_model, as in vLLM. MODULE:CLASS is a user's own.
        model: folder, or id on the hub, of what makes the drafts; for the last three of METHODS.
        prompt_lookup_min, prompt_lookup_max: so many of the latest tokens must have come before, and so many are
            compared.
    """

    num_speculative_tokens: int
    method: str = "ngram"
    model: str = ""
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5

    @classmethod
    def of(cls, text: str) -> SpeculativeConfig:
        """The options that a JSON object has. A ValueError if it is none, or an option is unknown or out of range."""
        try:
            options = json.loads(text)
        except ValueError as error:
            raise ValueError(f"speculative_config is no JSON: {error}; it must be an object") from None
        names = [field.name for field in fields(cls)]
        if not isinstance(options, dict):
            raise ValueError(f"speculative_config is {options!r:.200}; it must be an object with {', '.join(names)}")
        options = {name: value for name, value in options.items() if name not in IGNORED}
        if unknown := sorted(options.keys() - set(names)):
            raise ValueError(f"speculative_config has {unknown[0]!r:.80}; known: {', '.join(names)}")
        if options.get("method") == "suffix":
            options.setdefault("num_speculative_tokens", SUFFIX_DRAFTS)
        if "num_speculative_tokens" not in options:
            raise ValueError(
                f"speculative_config has no num_speculative_tokens; it must be a whole number from 1 to {MOST_DRAFTS}"
            )
        model, method = str(options.get("model") or ""), options.get("method")
        if model and method is None:
            name = model.rstrip("/").rpartition("/")[2].lower()
            options["method"] = next((kind for kind in ("eagle3", "eagle") if kind in name), "draft_model")
        elif isinstance(method, str) and method.endswith("_mtp"):  # vLLM names the families, too
            options["method"] = "mtp"
        made = cls(**options)
        made.check()
        return made

    @staticmethod
    def ignored(text: str) -> list[str]:
        """The options of a JSON object, as `of` reads it, that change nothing here."""
        return sorted(json.loads(text).keys() & IGNORED)

    @staticmethod
    def of_head(head: str, raw: dict[str, Any]) -> tuple[str, str] | None:
        """The model that the head in the folder `head` with this config.json was made for, and the JSON text of options
        with that head; None: Speculators has not saved it. A ValueError if the file does not name the model or the
        number of drafts."""
        if SPECULATORS not in raw:
            return None
        try:
            model = raw[SPECULATORS]["verifier"]["name_or_path"]
            drafts = raw[SPECULATORS]["proposal_methods"][0]["speculative_tokens"]
        except (KeyError, IndexError, TypeError):
            model = drafts = None
        if not isinstance(model, str) or not isinstance(drafts, int):
            raise ValueError(f"{head} is a draft head; its {SPECULATORS} names no verifier, or no speculative_tokens")
        return model, json.dumps(
            {"method": raw.get(SPECULATORS_METHOD), "model": head, "num_speculative_tokens": drafts}
        )

    @property
    def by_model(self) -> bool:
        """Whether a model makes the drafts, which has keys and values of its own, and takes its time."""
        return self.method in MODELS

    def check(self) -> None:
        """Raises a ValueError if an option is out of range."""
        if self.method not in METHODS and not (isinstance(self.method, str) and ":" in self.method):
            self._refuse("method", f"it must be one of {', '.join(METHODS)}, or MODULE:CLASS")
        if not isinstance(self.model, str):
            self._refuse("model", "it must be a folder or an id on the hub")
        names_model = MODELS.get(self.method, False)
        if bool(self.model) != names_model:
            rule = "there must be one" if names_model else "it must be left out"
            self._refuse("model", f"with method {self.method!r} {rule}")
        most = {"num_speculative_tokens": MOST_DRAFTS, "prompt_lookup_min": MOST_NGRAM, "prompt_lookup_max": MOST_NGRAM}
        for name, largest in most.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
                self._refuse(name, f"it must be a whole number from 1 to {largest}")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            self._refuse("prompt_lookup_min", f"it must be at most prompt_lookup_max, {self.prompt_lookup_max}")

    def _refuse(self, name: str, why: str) -> Any:
        raise ValueError(f"speculative_config: {name} is {getattr(self, name)!r:.80}; {why}")
