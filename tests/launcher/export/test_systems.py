"""The files of each system: their words, their form, and who takes them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from launcher.errors import ConfigError
from launcher.export.job import ExportedJob, setup_script
from launcher.export.kubernetes import render_kubernetes
from launcher.export.skypilot import render_skypilot
from launcher.export.slurm import render_slurm
from launcher.export.target import parse_target
from launcher.export.torchrun import render_torchrun
from trainer.config.run import RunConfig

PUBLISHED = Path(__file__).with_name("jobset-v0.12.0.json")
RENDERERS = (render_torchrun, render_slurm, render_skypilot, render_kubernetes)


def job(target: str = "2 nodes x 8 H100", settings: dict[str, Any] | None = None) -> ExportedJob:
    tree = {
        "task": "causal-lm",
        "model": {"path": "inputs/model"},
        "data": {"train": "inputs/train.jsonl"},
    }
    config = RunConfig.model_validate(tree).with_settings(settings or {})
    return ExportedJob(
        run_id="run-20261123-011508-707a",
        config=config,
        target=parse_target(target),
        version="0.1.0",
        wheel="motley-0.1.0-py3-none-any.whl",
    )


def closed(schema: Any) -> Any:
    """Return a schema that refuses keys that it does not know, as a server's strict check does."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(part) for key, part in schema.items()}
    if "properties" in schema and schema.get("type") == "object":
        made["additionalProperties"] = False
    return made


@pytest.fixture(scope="module")
def published() -> dict[str, Any]:
    """Return the JobSet's schema, with metadata open: the server has that schema."""
    return closed(json.loads(PUBLISHED.read_text())["schema"])


def pod_schema(published: dict[str, Any]) -> dict[str, Any]:
    spec = published["properties"]["spec"]["properties"]
    indexed = spec["replicatedJobs"]["items"]["properties"]["template"]["properties"]["spec"]
    return indexed["properties"]["template"]["properties"]["spec"]


@pytest.mark.parametrize("target", ["2 nodes x 8 H100", "1 node x 2 CPU"])
def test_the_objects_are_those_of_the_published_schema(
    published: dict[str, Any], target: str
) -> None:
    files = render_kubernetes(job(target)).files
    jobset = yaml.safe_load(files["jobset.yaml"])
    jsonschema.validate(jobset, published)
    claim, pod = yaml.safe_load_all(files["files.yaml"])
    jsonschema.validate(pod["spec"], pod_schema(published))
    policies = published["properties"]["spec"]["properties"]["volumeClaimPolicies"]
    template = policies["items"]["properties"]["templates"]["items"]["properties"]
    jsonschema.validate(claim["spec"], template["spec"])

    # One pod a node; they mount the claim, and node 0 has the name that the command gives.
    indexed = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    spec = indexed["template"]["spec"]
    assert indexed["completions"] == indexed["parallelism"] == parse_target(target).nodes
    assert spec["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    name = jobset["metadata"]["name"]
    assert spec["containers"][0]["command"][-1] == f"{name}-node-0-0.{name}"


def test_slurm_gets_a_task_for_each_device_and_a_signal_before_the_end() -> None:
    text = render_slurm(job()).files["job.sbatch"]
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", text, re.MULTILINE))
    assert (options["nodes"], options["ntasks-per-node"]) == ("2", "8")
    assert options["gpus-per-node"] == "8"
    assert options["signal"] == "TERM@120"
    assert options["cpus-per-task"] == "4"
    words = shlex.split(text.replace("\\\n", "").splitlines()[-1])
    # srun takes the script's option for the whole job's, and gives a task one core without its own.
    assert words[:4] == [
        "exec",
        "srun",
        "--kill-on-bad-exit=1",
        "--cpus-per-task=$SLURM_CPUS_PER_TASK",
    ]
    assert words[4:8] == ["$python", "-P", "-m", "trainer"]
    assert words[words.index("--gpu-backend") + 1] == "cuda"
    assert "gpus" not in render_slurm(job("2 nodes x 2 CPU")).files["job.sbatch"]


def test_torchrun_is_told_the_nodes_and_asks_for_what_it_needs(tmp_path: Path) -> None:
    rendered = render_torchrun(job("3 nodes x 2 CPU"))
    script = tmp_path / "torchrun.sh"
    script.write_text(rendered.files["torchrun.sh"])
    programs = tmp_path / ".venv/bin"
    programs.mkdir(parents=True)
    fake = programs / "python"
    fake.write_text(f"#!{sys.executable}\nimport sys\nprint(*sys.argv[1:], sep='\\n')\n")
    fake.chmod(0o755)
    command = ["sh", str(script), "2", "10.0.0.1; echo no"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    said = done.stdout.splitlines()
    assert said[said.index("--node-rank") + 1] == "2"
    assert said[said.index("--master-addr") + 1] == "10.0.0.1; echo no"
    assert said[said.index("--nnodes") + 1] == "3"
    assert said[said.index("--gpu-backend") + 1] == "cpu"
    lacking = subprocess.run(["sh", str(script)], capture_output=True, text=True)
    assert lacking.returncode == 2
    assert (
        lacking.stderr == "usage: torchrun.sh NODE MASTER: a number below 3, and node 0's address\n"
    )


@pytest.mark.parametrize(
    ("run_id", "name"),
    [
        ("run-20261123-011508-707a", "run-20261123-011508-707a"),
        ("7b-lora-20261123-011508-707a", "run-7b-lora-20261123-011508-707a"),
        ("a.b_-", "a.b"),
        ("7", "run-7"),
    ],
)
def test_skypilots_names_begin_with_a_letter(run_id: str, name: str) -> None:
    """Its task's, and its cluster's in each command."""
    rendered = render_skypilot(dataclasses.replace(job(), run_id=run_id))
    assert yaml.safe_load(rendered.files["task.yaml"])["name"] == name
    assert re.fullmatch("[a-zA-Z]([-_.a-zA-Z0-9]*[a-zA-Z0-9])?", name)
    launch, fetch, down = rendered.steps
    assert launch.startswith(f"sky launch -c {name} task.yaml")
    assert fetch.startswith(f"rsync -a {name}:sky_workdir/output/ output/")
    assert down == f"sky down {name}"


def test_the_task_names_the_devices_as_skypilot_does() -> None:
    task = yaml.safe_load(render_skypilot(job("2 nodes x 4 A100-80G")).files["task.yaml"])
    assert task["num_nodes"] == 2
    assert task["resources"] == {"accelerators": "A100-80GB:4"}
    begin, *_, end = task["setup"].splitlines()
    assert begin.startswith("# Motley needs Python 3.11; if the image has an earlier one")
    assert end == "sh setup.sh"
    with pytest.raises(ConfigError, match=r"checkpoint\.sharded: SkyPilot's nodes share no folder"):
        render_skypilot(job(settings={"checkpoint.sharded": True}))


@pytest.mark.needs("shellcheck")
@pytest.mark.parametrize("render", RENDERERS)
def test_shellcheck_finds_nothing(render: Any, tmp_path: Path) -> None:
    files = {**render(job()).files, "setup.sh": setup_script(job())}
    scripts = {name: text for name, text in files.items() if text.startswith("#!")}
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
    command = ["shellcheck", "--norc", *scripts]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("has", [True, False], ids=["3.11", "3.10"])
def test_skypilots_setup_takes_condas_python_where_the_images_is_too_old(
    tmp_path: Path, has: bool
) -> None:
    """The programs note how they are called; what SkyPilot runs is this text, by bash."""
    programs = {
        "python3": f"#!/bin/sh\nexit {int(not has)}\n",
        "conda": '#!/bin/sh\necho conda "$@"\n',
        "sh": '#!/bin/sh\necho "$@" with "${PYTHON:-python3}"\n',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    setup = yaml.safe_load(render_skypilot(job()).files["task.yaml"])["setup"]
    here = {"PATH": f"{tmp_path}", "HOME": f"{tmp_path}"}
    done = subprocess.run(
        ["/bin/bash", "-c", setup], env=here, capture_output=True, text=True, check=True
    )
    made = f"conda create --yes --quiet --prefix {tmp_path}/motley-python python=3.12"
    own = f"setup.sh with {tmp_path}/motley-python/bin/python3"
    assert done.stdout.splitlines() == (["setup.sh with python3"] if has else [made, own])


@pytest.mark.parametrize("target", ["2 nodes x 8 H100", "3 nodes x 2 CPU"])
def test_every_container_has_requests_and_no_root(target: str) -> None:
    files = render_kubernetes(job(target)).files
    jobset = yaml.safe_load(files["jobset.yaml"])
    (inner,) = jobset["spec"]["replicatedJobs"]
    _, loader = yaml.safe_load_all(files["files.yaml"])
    for pod in (inner["template"]["spec"]["template"]["spec"], loader["spec"]):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] > 0
        (container,) = pod["containers"]
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert "\nUSER 1000\n" in files["Containerfile"]


@pytest.mark.parametrize("name", ["4090-qlora", "7b", "run"])
def test_names_begin_with_a_letter(published: dict[str, Any], name: str) -> None:
    exported = dataclasses.replace(job(), run_id=f"{name}-20261123-011508-707a")
    objects = render_kubernetes(exported).files
    jobset = yaml.safe_load(objects["jobset.yaml"])
    jsonschema.validate(jobset, published)
    claim, pod = yaml.safe_load_all(objects["files.yaml"])
    names = [each["metadata"]["name"] for each in (jobset, claim, pod)]
    names.append(yaml.safe_load(render_skypilot(exported).files["task.yaml"])["name"])
    names += re.findall(r"job-name=(\S+)", render_slurm(exported).files["job.sbatch"])
    assert len(names) == 5
    assert all(re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", each) for each in names), names


def test_a_run_id_that_is_none_and_one_too_long_for_pods() -> None:
    with pytest.raises(ConfigError, match=r"run id '\$\(id\)': must consist of lower-case letters"):
        dataclasses.replace(job(), run_id="$(id)")
    long = dataclasses.replace(job(), run_id="a" * 60)
    with pytest.raises(ConfigError, match="6 characters too long for the names of pods"):
        render_kubernetes(long)


@pytest.mark.long
@pytest.mark.needs("sky")
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("target", "chosen"), [("2 nodes x 8 H100", "gpu_8x"), ("1 node x 4 CPU", "cpu_4x")]
)
def test_skypilots_parser_and_optimizer_take_the_task(
    target: str, chosen: str, tmp_path: Path
) -> None:
    """SkyPilot comes from an environment of its own; its prices here are made up."""
    catalog = tmp_path / ".sky/catalogs/v8"
    (catalog / "lambda").mkdir(parents=True)
    (catalog / "common").mkdir()
    rows = [
        "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice",
        "gpu_8x_h100,H100,8,208,1800,24,us-east-1,,",
        "cpu_4x,,0,4,16,0.1,us-east-1,,",
    ]
    (catalog / "lambda/vms.csv").write_text("\n".join(rows) + "\n")
    lists = "AcceleratorName,Clouds\nH100,['Lambda']\n"
    (catalog / "common/accelerators.csv").write_text(lists)
    (catalog / "common/metadata.csv").write_text("GPU,MemoryGB\nH100,80\n")
    folder = tmp_path / "run"
    folder.mkdir()
    for name, text in render_skypilot(job(target)).files.items():
        (folder / name).write_text(text)
    python = Path(str(shutil.which("sky"))).resolve().with_name("python")
    environment = {**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    environment.pop("PYTHONPATH")
    program = str(Path(__file__).with_name("optimize_task.py"))
    done = subprocess.run(
        [str(python), program], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Dryrun finished." in done.stdout
    found = json.loads(done.stdout[done.stdout.rindex("{") :])
    assert found["nodes"] == parse_target(target).nodes
    assert found["instance"].startswith(chosen)
