"""docs/scale.md and its examples: tables match the model, and programs accept the commands and
manifests.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import typer
from accelerate.commands.launch import launch_command_parser
from ruamel.yaml import YAML
from torch.distributed.run import get_args_parser

from tests.docs import scale
from tests.docs.blocks import ROOT, blocks
from valence import cli
from valence.distributed.process_group import DEADLINE

PAGE = scale.PAGE.read_text(encoding="utf-8")
ONE_GPU = scale.ONE_GPU.read_text(encoding="utf-8")
LINES = [line for block in blocks(PAGE, "sh") for line in block.text.splitlines()]


@pytest.mark.slow
def test_the_tables_are_up_to_date() -> None:
    titles = [match[2] for match in scale.TABLE.finditer(PAGE)]
    assert titles == ["Memory per GPU", "Balance"]
    assert scale.page() == PAGE, "run `python -m tests.docs.scale`"
    assert scale.examples(ONE_GPU) == ONE_GPU, "run `python -m tests.docs.scale`"


def test_each_example_leaves_a_fifth_of_the_memory_free() -> None:
    sections = [*scale.EXAMPLE.finditer(ONE_GPU), *scale.EXAMPLE.finditer(PAGE)]
    assert [(match[1], match[2]) for match in sections] == [("one", "24"), ("8", "80"), ("8", "80")]
    for match in sections:
        assert len(scale.PARTS.findall(match[0])) == 1
        assert len(scale.CHANGE.findall(match[0])) >= 5
        [total] = re.findall(r"^\| \*\*total\*\* \| ([\d.]+) \|$", match[0], re.MULTILINE)
        assert float(total) < 0.8 * int(match[2])


def test_the_page_tells_the_deadline() -> None:
    assert f" {DEADLINE:g} s " in PAGE


def options(command: list[str]) -> dict[str, Any]:
    """What a command of Valence is asked to do. Raises when it does not take that."""
    name, *arguments = command
    return typer.main.get_command(cli.app).commands[name].make_context(name, arguments).params  # type: ignore[attr-defined]


def test_its_commands_are_ones_that_the_launchers_and_valence_take() -> None:
    results = [line for line in LINES if line.startswith("torchrun ")]
    assert len(results) == 3
    for line in results:
        requests = get_args_parser().parse_args(shlex.split(line)[1:])
        assert (requests.module, requests.training_script, requests.nproc_per_node) == (
            True,
            "valence",
            "8",
        )
        assert options(requests.training_script_args)["nproc"] is None
    (line,) = [line for line in LINES if line.startswith("accelerate ")]
    requests = launch_command_parser().parse_args(shlex.split(line)[2:])
    assert (requests.module, requests.training_script, requests.num_processes) == (
        True,
        "valence",
        8,
    )
    assert [
        options(shlex.split(line)[1:])["nproc"] for line in LINES if line.startswith("valence ")
    ] == [8, 8, 2]


@pytest.mark.parametrize("name", ["train", "evaluate", "score", "sample", "export"])
def test_these_commands_take_nproc(name: str) -> None:
    result = typer.main.get_command(cli.app).commands[name]  # type: ignore[attr-defined]
    assert "nproc" in {parameter.name for parameter in result.params}


# Kubernetes


def manifest(name: str) -> Any:
    return YAML(typ="safe").load((ROOT / "examples/kubernetes" / name).read_text(encoding="utf-8"))


def check_pod(spec: Any) -> Any:
    """The pod's only container: it works on a shared volume, and has as long to save as torchrun
    gives it.
    """
    (container,) = spec["containers"]
    claims = {item["name"] for item in spec["volumes"] if "persistentVolumeClaim" in item}
    mounts = {item["name"]: item["mountPath"] for item in container["volumeMounts"]}
    assert mounts.keys() == {item["name"] for item in spec["volumes"]}
    assert container["workingDir"] in {mounts[name] for name in claims}
    messages = {item["name"]: item["value"] for item in container["env"]}
    assert int(messages["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) == spec["terminationGracePeriodSeconds"]
    return container


def test_the_jobset_starts_torchrun_on_each_host_and_all_again_when_one_fails() -> None:
    result = manifest("jobset.yaml")
    name, (job,) = result["metadata"]["name"], result["spec"]["replicatedJobs"]
    assert result["spec"]["network"]["enableDNSHostnames"]
    assert result["spec"]["failurePolicy"]["maxRestarts"]
    hosts = job["template"]["spec"]
    container = check_pod(hosts["template"]["spec"])
    shell, option, line = container["command"]
    assert (shell, option, hosts["backoffLimit"]) == ("bash", "-c", 0)
    exec_, torchrun, *arguments = shlex.split(line.replace("$JOB_COMPLETION_INDEX", "1"))
    assert (exec_, torchrun) == ("exec", "torchrun")
    request = get_args_parser().parse_args(arguments)
    assert int(request.nnodes) == hosts["parallelism"] == hosts["completions"]
    assert int(request.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert request.master_addr == f"{name}-{job['name']}-0-0.{name}"
    assert [request.master_port] == [port["containerPort"] for port in container["ports"]]
    assert (request.node_rank, request.module, request.training_script) == (1, True, "valence")
    assert options(request.training_script_args)


def test_the_pytorchjob_starts_torchrun_on_each_host() -> None:
    spec = manifest("pytorchjob.yaml")["spec"]
    hosts = spec["pytorchReplicaSpecs"]
    assert hosts["Master"]["template"] == hosts["Worker"]["template"]
    container = check_pod(hosts["Master"]["template"]["spec"])
    assert container["name"] == "pytorch"
    assert int(spec["nprocPerNode"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    torchrun, *arguments = container["command"]
    request = get_args_parser().parse_args(arguments)
    assert (torchrun, request.module, request.training_script) == ("torchrun", True, "valence")
    assert options(request.training_script_args)
