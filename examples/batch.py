"""Many prompts at once, each with its own parameters: `PYTHONPATH=. python examples/batch.py`."""

from engine import LLM, SamplingParams

llm = LLM("demo", threads=1, max_model_len=256, max_num_seqs=8)
prompts = [f"What is {number} + {number}?" for number in range(20, 28)]
conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
params = [SamplingParams(temperature=0.5, seed=number, max_tokens=16) for number in range(8)]

for prompt, output in zip(prompts, llm.chat(conversations, params, use_tqdm=False), strict=True):
    answer = output.outputs[0]
    print(prompt, answer.text, f"({len(answer.token_ids)} tokens, {answer.finish_reason})")

metrics = llm.get_metrics()
print(f"{metrics['generation_tokens_total']:.0f} tokens")
