"""A chat of two turns: `PYTHONPATH=. python examples/chat.py`."""

from engine import LLM, SamplingParams

llm = LLM("demo", threads=1, max_model_len=512, max_num_seqs=1)
params = SamplingParams(temperature=0, max_tokens=64)
messages = []
for question in ("What is 23 + 58?", "Spell stone backwards."):
    messages.append({"role": "user", "content": question})
    answer = llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text
    messages.append({"role": "assistant", "content": answer})
    print(f"{question} {answer}")
