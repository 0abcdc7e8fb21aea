"""The options of `--speculative-config`; nothing here needs torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

# Methods by which a model makes the drafts, and whether the option `model` names it.
MODELS = {"mtp": False, "draft_model": True, "eagle": True, "eagle3": True}
METHODS = ("ngram", *MODELS)
MOST_DRAFTS = 8
MOST_NGRAM = 16  # tokens that a look-up compares
LOOKUP_BOUNDS = ("prompt_lookup_min", "prompt_lookup_max")


@dataclass(frozen=True)
class SpeculativeConfig:
    """Options of speculative decoding, by vLLM's names.

    Attributes:
        num_speculative_tokens: drafts that a step verifies for a sequence, at most.
        method: `ngram` proposes what followed the latest tokens when they came before, in the prompt or the output.
            `mtp` asks the head that the model's own checkpoint has, `draft_model` a smaller model with the same
            tokenizer, and `eagle` and `eagle3` a head that was made for the model. Without a method, a `model` is an
            eagle3 or eagle if its name says so, else a draft_model, as in vLLM. MODULE:CLASS is a user's own.
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
        """The options that a JSON object has.

        Raises:
            ValueError: it is none, or an option is unknown or out of range.
        """
        try:
            options = json.loads(text)
        except ValueError as error:
            raise ValueError(f"speculative_config is no JSON: {error}; it must be an object") from None
        names = [field.name for field in fields(cls)]
        if not isinstance(options, dict):
            raise ValueError(f"speculative_config is {options!r:.200}; it must be an object with {', '.join(names)}")
        if unknown := sorted(options.keys() - set(names)):
            raise ValueError(f"speculative_config has {unknown[0]!r:.80}; known: {', '.join(names)}")
        if "num_speculative_tokens" not in options:
            raise ValueError(
                f"speculative_config has no num_speculative_tokens; it must be a whole number from 1 to {MOST_DRAFTS}"
            )
        bounds = [options[name] for name in LOOKUP_BOUNDS if name in options]
        if len(bounds) == 1 and isinstance(bounds[0], int):  # the other one follows, if need be
            options.setdefault("prompt_lookup_min", min(cls.prompt_lookup_min, *bounds))
            options.setdefault("prompt_lookup_max", max(cls.prompt_lookup_max, *bounds))
        model, method = str(options.get("model") or ""), options.get("method")
        if model and method is None:
            name = model.rstrip("/").rpartition("/")[2].lower()
            options["method"] = next((kind for kind in ("eagle3", "eagle") if kind in name), "draft_model")
        elif isinstance(method, str) and method.endswith("_mtp"):  # vLLM names the families, too
            options["method"] = "mtp"
        made = cls(**options)
        made.check()
        return made

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
        most = {"num_speculative_tokens": MOST_DRAFTS} | dict.fromkeys(LOOKUP_BOUNDS, MOST_NGRAM)
        for name, largest in most.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
                self._refuse(name, f"it must be a whole number from 1 to {largest}")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            self._refuse("prompt_lookup_min", f"it must be at most prompt_lookup_max, {self.prompt_lookup_max}")

    def _refuse(self, name: str, why: str) -> Any:
        raise ValueError(f"speculative_config: {name} is {getattr(self, name)!r:.80}; {why}")
