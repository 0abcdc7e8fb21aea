"""EleutherAI's lm-eval: a random checkpoint gets the same scores through the server as from transformers.

The promise is that log-likelihoods differ by at most 1e-4. The harness adds up log-probabilities in the type that the
model has. In float32, neighbours at 1000, which long texts reach, are 6e-5 apart, so that the sum alone may be 1e-4 off
the truth. So long texts are compared with the harness's sums in float64, and short answers with both.
"""

import itertools
import os

import lm_eval
from lm_eval.tasks import TaskManager

TASKS = ["sums", "sums_rolling", "sums_written"]
TINY, LENGTH = os.environ["TINY"], 512
os.chdir(os.environ["CLIENTS"])  # where the tasks look for their data
manager = TaskManager(include_path=".", include_defaults=False)


def samples(model, tasks, **options):
    """What was asked and answered in each sample of each task."""
    found = lm_eval.simple_evaluate(model, task_manager=manager, tasks=tasks, bootstrap_iters=0, **options)["samples"]
    return {task: sorted(found[task], key=lambda sample: sample["doc_id"]) for task in tasks}


def served(name, url, **more):
    return {
        "model": name, "base_url": url, "tokenizer": TINY, "tokenizer_backend": "huggingface", "max_length": LENGTH,
        "max_retries": 1, **more,
    }  # fmt: skip


url = os.environ["TINY_URL"] + "/v1/completions"
wanted = {
    dtype: samples(
        "hf", TASKS, model_args={"pretrained": TINY, "dtype": dtype, "max_length": LENGTH}, device="cpu", batch_size=1
    )
    for dtype in ("float32", "float64")
}
worst = {(task, dtype): 0.0 for task in TASKS[:2] for dtype in wanted}
for batch, concurrent in ((1, 1), (4, 1), (1, 8)):
    arguments = served("tiny", url, num_concurrent=concurrent)
    found = samples("local-completions", TASKS, model_args=arguments, batch_size=batch)
    for task, dtype in itertools.product(TASKS, wanted):
        assert len(found[task]) == 12
        for ours, theirs in zip(found[task], wanted[dtype][task], strict=True):
            assert ours["doc"] == theirs["doc"]
            for one, other in zip(ours["resps"], theirs["resps"], strict=True):
                if task == "sums_written":
                    assert one == other, (ours["doc"], one, other)
                    continue
                if task == "sums":  # has, too, whether it is the greedy answer
                    (one, greedy), (other, also) = one[0], other[0]
                    assert greedy == also, (ours["doc"], one, other)
                else:
                    one, other = one[0], other[0]
                worst[task, dtype] = max(worst[task, dtype], abs(one - other))
print("the largest differences of log-likelihoods:", worst)
del worst["sums_rolling", "float32"]
assert max(worst.values()) <= 1e-4

# Chats have no log-likelihoods. The demo adds rightly.
arguments = served("demo", os.environ["DEMO_URL"] + "/v1/chat/completions", num_concurrent=4)
answers = samples("local-chat-completions", ["sums_written"], model_args=arguments, apply_chat_template=True)
right = [
    sample["doc"]["choices"][sample["doc"]["answer"]].strip() in sample["resps"][0][0]
    for sample in answers["sums_written"]
]
assert sum(right) >= 10, right
