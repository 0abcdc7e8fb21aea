"""When each request ends under two policies, from journals: `PYTHONPATH=. python examples/own_policy.py OUT.svg`."""

import json
import sys
from pathlib import Path

from engine import LLM, SamplingParams
from scheduling.policy import Policy


class Shortest(Policy):
    """The request with the shortest prompt goes first."""

    def rank(self, group):
        return group.num_prompt


if __name__ == "__main__":
    plot, lengths, svg = Path(sys.argv[1]), (300, 200, 100, 50, 10), ""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for policy, color in (("fcfs", "gray"), ("own_policy:Shortest", "teal")):
        journal = f"{plot}.{color}.jsonl"
        options = {"scheduling_policy": policy, "log_scheduler": journal, "max_num_seqs": 1, "threads": 1}
        with LLM("demo", max_model_len=512, **options) as llm:
            llm.generate([[5] * length for length in lengths], params, use_tqdm=False)
        plans = [line for line in map(json.loads, Path(journal).read_text().splitlines()) if "rows" in line]
        ends = {name: plan["step"] for plan in plans for name, _ in plan["rows"]}  # each request's last step
        print(policy, ends)
        svg += "".join(f'<circle cx="{lengths[int(i)]}" cy="{10 * ends[i]}" r="4" fill="{color}"/>' for i in ends)
    plot.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" width="310" height="210">{svg}</svg>\n')
