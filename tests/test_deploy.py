"""The image and the manifests, against what the server knows: its commands, options, routes, and how it ends."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from api.gunicorn_loop import KEEP_ALIVE
from api.options import ServerConfig
from commands.flags import OptionParser, from_flags
from config import DEMO, VERSION, EngineConfig
from processes.child import STOP_TIMEOUT
from scripted import ScriptedClient, client_of
from server import COMMANDS

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "deploy" / "kubernetes"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
FILES = {path.stem: list(yaml.safe_load_all(path.read_text())) for path in FOLDER.glob("*.yaml")}
SERVERS = ("gpu", "cpu", "engines")
KEYS = {"api-key", "metrics-key"}  # of the Secret that README.md makes


def pod(name: str) -> dict[str, Any]:
    (deployment,) = FILES[name]
    return deployment["spec"]["template"]["spec"]


def container(name: str) -> dict[str, Any]:
    (only,) = pod(name)["containers"]
    return only


def options(name: str) -> tuple[EngineConfig, ServerConfig]:
    """What the server makes of the arguments, where the Secret's metrics key is `secret`; it refuses what is wrong."""
    parser = OptionParser(EngineConfig, ServerConfig)
    flags = parser.read([word.replace("$(METRICS_KEY)", "secret") for word in container(name)["args"]])
    return from_flags(EngineConfig, flags), from_flags(ServerConfig, flags)


@pytest.mark.parametrize("name", SERVERS)
def test_the_server_knows_its_options(name):
    engine, server = options(name)
    assert engine.model != DEMO and server.metrics_key == "secret"
    assert server.port == container(name)["ports"][0]["containerPort"]
    limits = container(name)["resources"]["limits"]
    gpus = limits.get("nvidia.com/gpu", 0)
    if gpus:
        assert gpus == engine.data_parallel_size * engine.world_size
    else:  # it would take all of the node's
        assert engine.threads == limits["cpu"] and engine.num_gpu_blocks_override
        assert engine.num_gpu_blocks_override * engine.block_size >= engine.max_model_len
    assert (engine.tensor_parallel_size > 1) == any(volume["name"] == "shm" for volume in pod(name)["volumes"])


@pytest.mark.parametrize("name", SERVERS)
def test_it_has_time_to_drain(name):
    engine, server = options(name)
    (sleep, before) = container(name)["lifecycle"]["preStop"]["exec"]["command"]
    processes = engine.data_parallel_size + (engine.data_parallel_size > 1)  # engines, and a coordinator
    needed = int(before) + server.drain_timeout + KEEP_ALIVE + STOP_TIMEOUT * processes
    assert sleep == "sleep" and pod(name)["terminationGracePeriodSeconds"] > needed


@pytest.mark.parametrize("name", SERVERS)
def test_it_has_time_to_start(name):
    probe = container(name)["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 1.5 * options(name)[0].startup_timeout


@pytest.mark.parametrize("name", SERVERS)
def test_probes_tell_what_they_are_to_tell(name):
    """Without a key; and a server that replaces its workers is not ready, but it lives."""
    engine = ScriptedClient()
    http = client_of(engine, api_key=("key",))
    probes = {kind: container(name)[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")}
    assert {probe["port"] for probe in probes.values()} == {"http"}
    assert [http.get(probe["path"]).status_code for probe in probes.values()] == [200, 200, 200]
    engine.trouble = "rank 0 has died; the workers are started anew"
    assert [http.get(probe["path"]).status_code for probe in probes.values()] == [503, 503, 200]


@pytest.mark.parametrize("name", SERVERS)
def test_names_agree(name):
    (deployment,) = FILES[name]
    claim, service = FILES["common"]
    (monitor,) = FILES["monitor"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels == deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    assert monitor["spec"]["selector"]["matchLabels"] == service["metadata"]["labels"]
    (port,), (ours,), (scraped,) = service["spec"]["ports"], container(name)["ports"], monitor["spec"]["endpoints"]
    assert port["targetPort"] == ours["name"] and scraped["port"] == port["name"]
    assert port["port"] == ours["containerPort"]
    volumes = {volume["name"]: volume for volume in pod(name)["volumes"]}
    assert volumes["models"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container(name)["volumeMounts"]}
    assert set(mounts.values()) == set(volumes) and {"/models", "/tmp"} <= set(mounts)


@pytest.mark.parametrize("name", SERVERS)
def test_keys_come_from_the_secret(name):
    secrets = {
        entry["name"]: entry["valueFrom"]["secretKeyRef"] for entry in container(name)["env"] if "valueFrom" in entry
    }
    assert {secret["name"] for secret in secrets.values()} == {"manta"}
    assert {secret["key"] for secret in secrets.values() if not secret.get("optional")} == KEYS
    assert secrets["MANTA_API_KEY"]["key"] == "api-key"
    (monitor,) = FILES["monitor"]
    read = monitor["spec"]["endpoints"][0]["authorization"]["credentials"]
    assert read == {"name": secrets["METRICS_KEY"]["name"], "key": secrets["METRICS_KEY"]["key"]}
    http = client_of(ScriptedClient(), api_key=("key",), metrics_key="secret")
    header = {"Authorization": "Bearer secret"}  # as the operator sends it
    assert http.get(monitor["spec"]["endpoints"][0]["path"], headers=header).status_code == 200
    made = (FOLDER.parent / "README.md").read_text()
    assert all(f"--from-literal={key}=" in made for key in {secret["key"] for secret in secrets.values()})


def test_they_are_of_this_version():
    texts = (path.read_text() for path in (FOLDER.parent / "README.md", *FOLDER.glob("*.yaml")))
    found = re.findall(r"(?:image\.version=|/manta:)([\w.]+)", "".join([DOCKERFILE, *texts]))
    assert len(found) == 3 + len(SERVERS) and set(found) == {VERSION}


@pytest.mark.parametrize("words", [*COMMANDS, "", "--model", "Qwen/Qwen3-0.6B"])
def test_the_image_takes_every_command_and_serves_without_one(tmp_path: Path, words: str):
    (script,) = re.findall(r"<<'EOF' \S+/manta-container\n(.*?)^EOF$", DOCKERFILE, re.MULTILINE | re.DOTALL)
    (tmp_path / "manta").write_text('#!/bin/sh\necho "$@"')
    (tmp_path / "manta").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["sh", "-c", script, "manta-container", *words.split(), "--port", "1"]
    output = subprocess.run(command, env=environment, capture_output=True, text=True).stdout
    serves = "serve --host 0.0.0.0"
    wanted = words if COMMANDS.keys() - {"serve"} & {words} else serves if words == "serve" else f"{serves} {words}"
    assert output.split() == [*wanted.split(), "--port", "1"]


def test_what_ends_a_server_waits_until_it_has_drained():
    needed = ServerConfig.drain_timeout + KEEP_ALIVE + STOP_TIMEOUT
    compose = yaml.safe_load((FOLDER.parent / "compose.yaml").read_text())["services"]["manta"]
    (unit,) = re.findall(r"^TimeoutStopSec=(\d+)$", (FOLDER.parent / "manta.service").read_text(), re.MULTILINE)
    assert min(int(compose["stop_grace_period"].removesuffix("s")), int(unit)) > needed


def test_proxies_hold_connections_and_bodies_as_the_server_does():
    for name in ("nginx.conf", "Caddyfile"):
        text = (FOLDER.parent / name).read_text()
        (idle,), (size,) = re.findall(r"keepalive(?:_timeout)? (\d+)s", text), re.findall(r"(\d+)(?:m|MB)\b", text)
        assert int(idle) < KEEP_ALIVE and int(size) * 2**20 == ServerConfig.max_body_bytes
        assert ServerConfig.request_timeout == 3600 and re.search(r"(read|header)_timeout 1h", text)
