"""Files for containers, clusters and conda: what they state of the package is so."""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memascend.version import __version__
from tests.support.seccomp import DENY_DOCKER, on_x86_64

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
#: Rights beyond Docker's defaults.
RIGHTS = {"privileged", "security_opt", "cap_add", "ipc", "pid", "network_mode", "devices"}


def text(name: str) -> str:
    return (DEPLOY / name).read_text(encoding="utf-8")


def parsed(name: str) -> Any:
    return yaml.safe_load(text(name))


def stated_requirements() -> set[str]:
    """Return what pyproject.toml requires to build and to run, without spaces."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lists = re.findall(r"^(?:requires|dependencies) = \[(.*?)\]", project, re.MULTILINE | re.DOTALL)
    return set(re.findall(r'"([^"]+)"', "".join(lists)))


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions, continued lines joined."""
    lines = re.sub(r"^\s*#.*\n", "", text("Dockerfile"), flags=re.MULTILINE)
    joined = lines.replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in joined if line.strip()]


def let_in(name: str) -> bool:
    """Return whether a path reaches the image: the last rule that fits decides, as in Docker."""
    result = True
    for rule in text("Dockerfile.dockerignore").splitlines():
        pattern = rule.lstrip("!").removeprefix("**/")
        parts = [name, *(str(folder) for folder in Path(name).parents), Path(name).name]
        if rule and not rule.startswith("#") and any(fnmatch.fnmatch(p, pattern) for p in parts):
            result = rule.startswith("!")
    return result


# -- containers ------------------------------------------------------------------------------------


def test_the_image_is_built_from_what_the_wheel_needs_and_nothing_built_before() -> None:
    needed = ["setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"]
    assert [
        name for name in (*needed, "csrc/base/align.hpp", "memascend/py.typed") if not let_in(name)
    ] == []
    assert [name for name in needed if not (ROOT / name).is_file()] == []
    assert not any(map(let_in, ("tests/conftest.py", ".git/HEAD", "memascend/_core.x.so")))


def test_the_image_needs_no_root_to_run_and_ends_with_the_doctor() -> None:
    found = instructions()
    assert {name for name, _ in found} <= {
        *("ARG", "FROM", "RUN", "COPY", "ENV", "USER", "WORKDIR", "CMD")
    }
    assert [value for name, value in found if name == "USER"] == ["trainer"]
    name, command = found[-1]
    assert (name, json.loads(command)) == ("CMD", ["memascend", "doctor", "--path", "/swap"])
    # DeepSpeed is built in an environment that has torch already.
    runs = [value for name, value in found if name == "RUN"]
    [torch] = [index for index, run in enumerate(runs) if "TORCH_SPEC" in run]
    [wheel] = [index for index, run in enumerate(runs) if "/dist/*.whl" in run]
    assert torch < wheel
    assert "--no-build-isolation" in runs[wheel]


def test_compose_asks_for_no_right_beyond_dockers_defaults() -> None:
    [service] = parsed("compose.yaml")["services"].values()
    assert not RIGHTS & set(service)
    build = service["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).resolve() == DEPLOY / "Dockerfile"
    assert {mount["target"] for mount in service["volumes"]} == {"/swap", "/work"}


def test_the_pod_states_what_kubernetes_wants_beside_huge_pages() -> None:
    specification = parsed("pod.yaml")["spec"]
    assert specification["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    [container] = specification["containers"]
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
    resources = container["resources"]
    assert "hugepages-2Mi" in resources["limits"]
    assert {"cpu", "memory"} <= set(resources["requests"])
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in specification["volumes"]}


@on_x86_64
def test_the_doctors_trial_passes_under_dockers_default_profile(tmp_path: Path) -> None:
    program = DENY_DOCKER + "from memascend.cli.main import main\nmain(sys.argv[1:])\n"
    done = subprocess.run(
        [sys.executable, "-c", "import sys\n" + program, "doctor", "--json", "--path", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["io_uring"]["state"] == "note"
    assert checks["trial"]["state"] == "ok"
    assert "read and compared by libaio" in checks["trial"]["found"]


# -- a cluster, conda ------------------------------------------------------------------------------


def run_job(
    folder: Path,
    script: str,
    stand_ins: dict[str, str],
    *,
    nvme_path: str = "@SWAP@",
    **variables: str,
) -> list[str]:
    """Run a script of Slurm's, with stand-ins for a cluster's programs; return its lines."""
    programs = folder / "bin"
    programs.mkdir()
    for name, does in stand_ins.items():
        (programs / name).write_text(f"#!/bin/bash\n{does}\n")
        (programs / name).chmod(0o700)
    config = folder / "ds.json"
    config.write_text(
        json.dumps({part: {"nvme_path": nvme_path} for part in ("param", "optimizer")})
    )
    done = subprocess.run(
        ["bash", DEPLOY / script, "train.py", config, "--max_steps", "3"],
        env={
            "PATH": f"{programs}:/usr/bin:/bin",
            "SLURM_TMPDIR": str(folder),
            "SLURM_JOB_ID": "7",
            "SLURM_SUBMIT_DIR": str(ROOT),
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert list(folder.glob("memascend-7-*")) == []
    return done.stdout.splitlines()


def check_node(folder: Path, lines: list[str], node: str) -> None:
    """Check what a node prints: the doctor, the launch with the words of the node, the JSON."""
    doctor, launch, written = lines
    job = rf"{folder}/memascend-7-\w+"
    assert re.fullmatch(rf"memascend doctor --path {job}/swap", doctor)
    assert re.fullmatch(rf"torchrun {node} {job}/ds.json --max_steps 3", launch)
    paths = {part["nvme_path"] for part in json.loads(written).values()}
    assert paths == {doctor.split()[-1]}


#: The thirteenth word is the JSON of the job.
NODE = {"memascend": 'echo "memascend $*"', "torchrun": 'echo "torchrun $*"; cat "${13}"'}


def test_the_job_of_one_node_has_a_folder_of_its_own(tmp_path: Path) -> None:
    lines = run_job(tmp_path, "slurm.sh", NODE)
    node = "--nnodes 1 --node_rank 0 --nproc_per_node 1 --master_addr 127.0.0.1 --master_port 20007"
    check_node(tmp_path, lines, f"{node} train.py --deepspeed_config")


def test_a_folder_of_the_json_is_that_of_the_doctor_and_of_the_run(tmp_path: Path) -> None:
    doctor, _, written = run_job(tmp_path, "slurm.sh", NODE, nvme_path="/mnt/ssd/my swap")
    assert doctor == "memascend doctor --path /mnt/ssd/my swap"
    assert {part["nvme_path"] for part in json.loads(written).values()} == {"/mnt/ssd/my swap"}


def test_the_recipe_states_this_version_and_the_requirements_of_the_package() -> None:
    recipe = yaml.safe_load(
        re.sub(r'"\{\{.*?\}\}"', "x", text("conda/meta.yaml")).replace("{{ PYTHON }}", "python")
    )
    assert recipe["package"]["version"] == __version__
    lists = [*recipe["requirements"]["host"], *recipe["requirements"]["run"]]
    stated = {name.replace("pytorch", "torch").replace(" ", "") for name in lists}
    assert stated_requirements() <= stated | {"wheel"}
    assert (DEPLOY / "conda" / recipe["source"]["path"]).resolve() == ROOT


def test_the_job_of_many_nodes_starts_the_launcher_of_each_node_on_all(tmp_path: Path) -> None:
    cluster = {
        "scontrol": 'printf "%s\\n" first second third fourth',
        "srun": 'echo "srun $1"; shift; SLURM_NODEID=3 "$@"',
    }
    srun, *lines = run_job(
        tmp_path,
        "slurm_nodes.sh",
        cluster | NODE,
        SLURM_JOB_NODELIST="node[1-4]",
        SLURM_JOB_NUM_NODES="4",
        SLURM_GPUS_ON_NODE="8",
    )
    assert srun == "srun --kill-on-bad-exit=1"
    node = "--nnodes 4 --node_rank 3 --nproc_per_node 8 --master_addr first --master_port 20007"
    check_node(tmp_path, lines, f"{node} train.py --deepspeed")


def test_every_pod_of_the_pytorchjob_is_a_node_of_its_launcher() -> None:
    replicas = parsed("pytorchjob.yaml")["spec"]["pytorchReplicaSpecs"]
    pods = [replicas[name]["template"]["spec"] for name in ("Master", "Worker")]
    assert pods[0] == pods[1]
    [container] = pods[0]["containers"]
    assert container["name"] == "pytorch"  # the operator sets its variables in no other
    assert (DEPLOY / container["command"][1]).name == "launch_node.sh"
    variables = {one["name"]: one["value"] for one in container["env"]}
    count = sum(replicas[name]["replicas"] for name in replicas)
    assert int(variables["NNODES"]) == count == 4
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert int(variables["NPROC_PER_NODE"]) == gpus == 8
    [monitor] = pods[0]["initContainers"]
    assert monitor["restartPolicy"] == "Always"
    for one in (container, monitor):
        assert one["securityContext"]["capabilities"]["drop"] == ["ALL"]
        mounted = {mount["name"] for mount in one["volumeMounts"]}
        assert mounted <= {volume["name"] for volume in pods[0]["volumes"]}
    assert variables["SCRATCH_LOCAL"] in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_a_file_that_was_not_run_says_so_at_its_top() -> None:
    for path in sorted(DEPLOY.rglob("*")):
        if path.suffix in (".sh", ".yaml") or path.name == "Dockerfile":
            top = path.read_text(encoding="utf-8")[:300].lower()
            assert "unrun" in top, path.name
