"""Jobs for schedulers: what is written is well formed, says what was asked, and lets nothing through to a shell."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from fourfold.cli import main
from fourfold.commands.cluster_scripts import yaml_lines

PLANNED = """
[model]
name = "gpt-125m"
[grid]
x = 4
z = 8
[plan]
machine = "perlmutter"
"""


def written(tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str, config: str = PLANNED) -> str:
    path = tmp_path / "run.toml"
    path.write_text(config)
    code = main(["launch", str(path), *options])
    found = capsys.readouterr()
    return found.out if code == 0 else found.err


def test_a_slurm_script_is_well_formed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--account", "physics", "--cpus", "16", "--time", "2-12:00:00"]
    script = written(tmp_path, capsys, "--slurm", "--out", "/shared/runs/a b", *more)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=10)
    given = dict(
        line.removeprefix("#SBATCH --").split("=", 1)
        for line in script.splitlines()
        if "SBATCH" in line and "=" in line
    )
    assert given == {
        "job-name": "fourfold", "nodes": "8", "ntasks-per-node": "4", "gpus-per-node": "4", "time": "2-12:00:00",
        "signal": "TERM@630", "output": "fourfold-%j.log", "open-mode": "append", "account": "physics",
        "cpus-per-task": "16",
    }  # fmt: skip
    assert "#SBATCH --requeue" in script
    assert "# YOURS: " in script and "module load" in script and "--container-image" in script
    [run] = [line for line in script.splitlines() if line.lstrip().startswith("srun")]
    words = shlex.split(run.split("&&")[0])
    assert words[words.index("train") + 1 :] == [str(tmp_path / "run.toml"), "--resume", "/shared/runs/a b"]


@pytest.mark.parametrize(("codes", "ends", "starts"), [("0", 0, 1), ("1 1 0", 0, 3), ("143", 0, 1), ("1 1 1 1", 1, 3)])
def test_the_script_tries_again_up_to_a_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], codes: str, ends: int, starts: int
) -> None:
    """With an srun of our own, whose exit codes are given."""
    script = written(tmp_path, capsys, "--slurm", "--out", "/shared/one", "--tries", "3")
    left, srun = tmp_path / "codes", tmp_path / "srun"
    left.write_text("\n".join(codes.split()) + "\n")
    srun.write_text(f"#!/bin/sh\necho start\ncode=$(head -n 1 {left})\nsed -i 1d {left}\nexit $code\n")
    srun.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    found = subprocess.run(["bash"], input=script, capture_output=True, text=True, env=env, check=False, timeout=20)
    assert found.returncode == ends
    assert found.stdout.count("start\n") == starts


def manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    asked = ["--k8s", "--out", "/runs/one", "--image", "registry/fourfold:1", "--claim", "shared"]
    items = yaml.safe_load_all(written(tmp_path, capsys, *asked, *options))
    return {item["kind"]: item for item in items}


@pytest.mark.parametrize(
    "text",
    [
        PLANNED.lstrip(),
        "a = 1\n",
        "\n",
        "a = 1",
        "  x = 1\n",
        "a: é\n\tb\n",
        "# ü\nb = 2\n",
        "\na\n \nb\n",
        "\n\na\n\n  b \n",
        "# a\n# b\n",
        "-\n\n",
    ],
)
def test_a_config_is_the_same_in_a_manifest(text: str) -> None:
    value = {
        "data": {"run.toml": text},
        "list": [{"a": 1, "b": [True, None, "x: y"]}, ["#", ["- "]], {}, []],
        "end": 0.5,
    }
    value |= {"beyond 16 bits": "\U0001f600 \\ud83d \x7f\x85\u2028 ", "a block": "path = '\U0001f600'\n"}
    assert yaml.safe_load("\n".join(yaml_lines(value))) == value


def test_a_config_can_be_read_in_a_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--k8s", "--out", "/runs/one", "--image", "registry/fourfold:1", "--claim", "shared"]
    text = written(tmp_path, capsys, *asked, config=PLANNED.lstrip())
    assert '  run.toml: |\n    [model]\n    name = "gpt-125m"\n    [grid]\n' in text
    assert "{" not in text and text.startswith('apiVersion: "v1"\nkind: "ConfigMap"\n')


def test_a_manifest_has_a_pod_for_each_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = manifest(tmp_path, capsys, "--name", "big-run", "--tries", "4")
    assert {item["metadata"]["name"] for item in found.values()} == {"big-run"}
    assert found["ConfigMap"]["data"] == {"run.toml": PLANNED}
    assert found["Service"]["spec"] == {"clusterIP": "None", "selector": {"app": "big-run"}}
    job = found["Job"]["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (8, 8, "Indexed")
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    assert job["template"]["metadata"]["labels"] == {"app": "big-run"}
    assert pod["terminationGracePeriodSeconds"] > 600, "a last checkpoint takes as long as ranks may take"
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 4}}
    command = container["command"]
    assert command[:3] == ["torchrun", "--nnodes=8", "--nproc-per-node=4"]
    assert "--rdzv-endpoint=big-run-0.big-run:29400" in command
    assert "--max-restarts=3" in command
    assert command[-3:] == ["/config/run.toml", "--resume", "/runs/one"]
    mounted = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == mounted
    assert container["securityContext"]["allowPrivilegeEscalation"] is False


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--slurm", "--name", "a; rm -rf ~"], "--name 'a; rm -rf ~' is not valid for a scheduler"),
        (["--slurm", "--account", "x\n#SBATCH --uid=0"], "is not valid for a scheduler"),
        (["--slurm", "--time", "long"], "--time 'long' is not valid for a scheduler"),
        (["--slurm", "--devices", "4"], "--devices 4, but the config's grid x=4 z=8 has 32"),
        (["--slurm", "--per-node", "5"], "32 devices do not fill nodes of 5"),
        (["--slurm", "--tries", "0"], "--tries 0 must be at least 1"),
        (["--k8s", "--out", "runs/one"], "--out runs/one must be an absolute path"),
        (["--k8s", "--claim", "c"], "--k8s needs --image"),
    ],
)
def test_what_no_scheduler_takes_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert said in written(tmp_path, capsys, "--out", "/runs/one", *options)


def test_nodes_have_at_least_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["launch", "run.toml", "--slurm", "--per-node", "-1"])
    assert "argument --per-node: -1 is less than 1" in capsys.readouterr().err


def test_a_grid_that_is_still_to_be_found_needs_a_number_of_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    auto = PLANNED.replace("x = 4\nz = 8\n", "")
    assert "give --devices" in written(tmp_path, capsys, "--slurm", "--out", "/runs/one", config=auto)
    script = written(tmp_path, capsys, "--slurm", "--out", "/runs/one", "--devices", "16", config=auto)
    assert re.search("--nodes=4$", script, re.MULTILINE)
