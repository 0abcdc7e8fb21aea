"""GuideLLM, a benchmark, by its command line: every request of each kind goes through."""

import json
import os
import subprocess
from pathlib import Path

for kind in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
    report = Path.cwd() / (kind.replace("/", "_") + ".json")
    command = [
        "guidellm", "run", "--disable-console", "--backend",
        f"kind=openai_http,target={os.environ['DEMO_URL']},model=demo,request_format={kind}",
        "--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=12",
        "--tokenizer", f"kind=huggingface_auto,model={os.environ['DEMO']}",
        "--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=8", "--output", f"kind=json,path={report}",
    ]  # fmt: skip
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    requests = json.loads(report.read_text())["benchmarks"][0]["requests"]
    assert not requests["errored"], requests["errored"][0]
    assert len(requests["successful"]) >= 12, len(requests["successful"])
