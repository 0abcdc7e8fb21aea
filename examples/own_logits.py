"""A logits processor of one's own: no token twice in a row. `PYTHONPATH=. python examples/own_logits.py`."""

from engine import LLM, SamplingParams


class NoRepeat:
    """Made once in the worker, and called in each step before anything is drawn."""

    def __init__(self, config):
        pass

    def __call__(self, logits, slots, state):
        """logits [R, V]; slots [R]: each row's place in the batch state, -1 for padding."""
        slot = slots.long().clamp(min=0)
        last = state.token_ids[slot, (state.num_known[slot] - 1).clamp(min=0).long()]
        return logits.scatter(1, last[:, None].long(), float("-inf"))


if __name__ == "__main__":
    params = SamplingParams(temperature=0, max_tokens=8, logit_bias={9: 100, 11: 80})
    for processors in ((), ("own_logits:NoRepeat",)):
        llm = LLM("demo", threads=1, max_model_len=64, max_num_seqs=1, logits_processors=processors)
        print(processors, llm.generate("To be", params, use_tqdm=False)[0].outputs[0].token_ids)
