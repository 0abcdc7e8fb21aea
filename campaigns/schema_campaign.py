"""A campaign by hand: Schemathesis sends what /openapi.json allows, and what it does not, to servers on the demo.

    python -m venv VENV && VENV/bin/pip install schemathesis
    python campaigns/schema_campaign.py --schemathesis VENV/bin/schemathesis [--cases 5000] [--seed 0] [--workers 2]

Schemathesis has requirements of its own, so it gets a virtual environment of its own. First come the ends of all ranges
and other values that a schema suggests, in as many cases as that takes, then so many random ones, shared evenly by all
routes that take anything. One server generates, and another embeds. The campaign fails if a reply has a status of 500
or more, or a status, content type or body that the schema does not describe, or if a process of a server was replaced,
or a request is left in the engine. Other options go to Schemathesis.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from served import Server, eventually, serving

POOLING = ("/v1/embeddings", "/pooling", "/classify", "/score", "/rerank")
# Answers are short, so that time goes into requests.
FLAGS = ("--max-model-len", "96", "--max-output-tokens", "1024", "--max-num-seqs", "32", "--log-format", "json")
NAMED = re.compile(r"(?s)^(/v1/responses|/v1/models|/explain)/.*?(/input_items|/cancel|)$")
CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
    "allow_header_conformance",
)  # fmt: skip


def narrowed(schema: dict[str, Any], server: Server) -> dict[str, Any]:
    """The schema with the model's name, few tokens of output and ids that are there, or else most would be refused.

    Half of the answers are streams.
    """
    few = {name: {"enum": [1, 2, 5, 16, 40]} for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")}
    few["model"] = {"enum": ["demo"]}
    for fields in schema["components"]["schemas"].values():
        fields["properties"] |= {name: few[name] for name in few if name in fields["properties"]}
        if "stream" in fields["properties"]:
            fields["required"] += ["stream"]
            fields["properties"]["stream"] = {"type": "boolean"}
    tokenize = schema["components"]["schemas"]["TokenizeRequest"]  # that one of two must be there only a check tells
    tokenize["anyOf"] = [{"required": ["prompt"]}, {"required": ["messages"]}]
    ids: dict[str, list[str]] = {"name": ["demo"], "id": []}
    if "/v1/responses" in schema["paths"]:
        client = server.client()
        ids["id"] = [client.responses.create(model="demo", input="a", max_output_tokens=2).id for _ in range(100)]
        ids["id"] += [client.completions.create(model="demo", prompt="a", max_tokens=2).id for _ in range(100)]
    for path in schema["paths"].values():
        for operation in path.values():
            for parameter in operation.get("parameters", ()):
                if names := ids.get(parameter["name"]):
                    parameter["schema"] = {"enum": names}
    return schema


def campaign(server: Server, schemathesis: str, cases: int, pooling: bool, options: list[str], folder: Path) -> int:
    """Run so many cases over the routes of `POOLING`, or over the others; returns the exit status."""
    schema = json.loads(server.get("/openapi.json")[1])
    schema["paths"] = {path: item for path, item in schema["paths"].items() if (path in POOLING) == pooling}
    schema = narrowed(schema, server)
    (folder / "openapi.json").write_text(json.dumps(schema))
    operations = [operation for path in schema["paths"].values() for operation in path.values()]
    asking = [operation for operation in operations if "requestBody" in operation or operation["parameters"]]
    command = [
        schemathesis, "run", str(folder / "openapi.json"), "--url", f"http://127.0.0.1:{server.port}", "--mode", "all",
        "--phases", "coverage,fuzzing", "--max-examples", str(-(-cases // len(asking))), "--checks", ",".join(CHECKS),
        "--continue-on-failure", "--generation-database", "none", "--suppress-health-check", "all",
        "--request-timeout", "60", "--warnings", "off", "--no-color", *options,
    ]  # fmt: skip
    status = subprocess.run(command, cwd=folder).returncode
    eventually(lambda: server.running() == 0, 60)
    assert server.family() == server.pids, "a process was replaced"
    return status


def report(log: str) -> None:
    """Print how many requests of each route had which status."""
    assert "Traceback" not in log, log[-4000:]
    seen: dict[str, Counter[int]] = {}
    for line in log.splitlines():
        entry = json.loads(line) if line.startswith("{") else {}
        if "path" in entry:
            place = NAMED.sub(r"\1/*\2", entry["path"])
            seen.setdefault(f"{entry['method']} {place}", Counter())[entry["status"]] += 1
    for route, statuses in sorted(seen.items()):
        print(f"{sum(statuses.values()):6} {route[:60]:60} {dict(sorted(statuses.items()))}")
    total = sum(seen.values(), Counter())
    print(f"{sum(total.values()):6} in all {dict(sorted(total.items()))}")


def main() -> int:
    """The campaign; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemathesis", default="schemathesis", help="the program")
    parser.add_argument("--cases", type=int, default=5000, help="random ones in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="requests at a time")
    args, others = parser.parse_known_args()
    options, worst = ["--seed", str(args.seed), "--workers", str(args.workers), *others], 0
    for pooling in (False, True):
        cases = round(args.cases * (0.25 if pooling else 0.75))
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            with serving(folder, *FLAGS, *(("--task", "embed") if pooling else ())) as server:
                status = campaign(server, args.schemathesis, cases, pooling, options, folder)
            worst = max(worst, status)
            report(server.log.read_text())
    return worst


if __name__ == "__main__":
    sys.exit(main())
