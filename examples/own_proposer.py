"""Drafts by a class of one's own, and how many are accepted: `PYTHONPATH=. python examples/own_proposer.py`."""

from engine import LLM, SamplingParams


class Repeat:
    """Guesses that the last token comes again, and again."""

    def __init__(self, config, k):
        self.k = k

    def propose(self, state):
        """Drafts [slots, k] int32, for every slot of the batch state."""
        last = state.token_ids.gather(1, (state.num_known - 1).clamp(min=0).long()[:, None])
        return last.expand(-1, self.k)


if __name__ == "__main__":
    drafts = {"method": "own_proposer:Repeat", "num_speculative_tokens": 3}
    # A context of 40 tokens is too short to time drafts at the start, so every step makes them.
    llm = LLM("demo", threads=1, max_model_len=40, max_num_seqs=8, speculative_config=drafts)
    for name, bias in (("ordinary text", None), ("one token, again and again", {9: 100})):
        before = llm.get_metrics()["spec_decode_num_accepted_tokens_total"]
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logit_bias=bias)
        llm.generate("To be, or not", params, use_tqdm=False)
        accepted = llm.get_metrics()["spec_decode_num_accepted_tokens_total"] - before
        print(f"{name}: {accepted:.0f} drafts were accepted")
