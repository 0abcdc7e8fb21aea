"""Simon Willison's `llm`, by its command line, with models that its file of extra models names."""

import json
import os
import subprocess
from pathlib import Path

URL = os.environ["DEMO_URL"] + "/v1"
folder = Path.cwd() / "llm"
folder.mkdir()
models = [
    {"model_id": "demo", "model_name": "demo", "api_base": URL},
    {"model_id": "whole", "model_name": "demo", "api_base": URL, "can_stream": False},
    {"model_id": "text", "model_name": "demo", "api_base": URL, "completion": True},
    {"model_id": "said", "model_name": "demo", "api_base": URL, "responses": True},
    {"model_id": "other", "model_name": "other", "api_base": URL},
]
for model in models:
    model |= {"supports_schema": True, "supports_tools": True} if model["model_id"] in ("demo", "whole", "said") else {}
(folder / "extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is YAML


def llm(*arguments, code=0):
    found = subprocess.run(
        ["llm", *arguments], env=os.environ | {"LLM_USER_PATH": str(folder)}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert found.returncode == code, (arguments, found)
    return found.stdout if code == 0 else found.stderr


for model in ("demo", "whole", "said"):
    assert "81" in llm("-m", model, "-o", "temperature", "0", "What is 23 + 58?"), model
assert "81" in llm("-m", "demo", "--no-stream", "-s", "Be brief.", "What is 23 + 58?")
assert llm("-m", "text", "-o", "max_tokens", "8", "To be, or not").strip()
llm("-m", "demo", "My cat is called Tom.")
assert llm("-c", "What is 2 + 3?").strip()  # goes on with the last conversation
logged = json.loads(llm("logs", "--json", "-n", "1"))[0]
assert logged["input_tokens"] > 20, logged
assert "other" in llm("-m", "other", "Hi", code=1)

# Schemas and tools; whether a tool is called is left to the model.
DIGITS = {"type": "integer", "minimum": 0, "maximum": 99}
schema = {"type": "object", "properties": {"a": DIGITS}, "required": ["a"], "additionalProperties": False}
for model in ("demo", "whole", "said"):
    found = json.loads(llm("-m", model, "-o", "temperature", "0", "--schema", json.dumps(schema), "What is 23 + 58?"))
    assert 0 <= found["a"] <= 99 and len(found) == 1, found
    assert llm("-m", model, "-o", "temperature", "0", "-T", "llm_version", "What is 23 + 58?").strip()
