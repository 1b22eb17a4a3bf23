"""How many cores a rank has: affinity, control groups, and the variables of launchers."""

from __future__ import annotations

import os

import pytest

from streamline.core.cpus import cpu_quota, cpus_here, cpus_of, usable_cpus

SLURM = {"SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("environ", "cpus"),
    [
        ({}, 16),
        ({"LOCAL_WORLD_SIZE": "8"}, 2),
        ({"LOCAL_WORLD_SIZE": "5"}, 3),
        ({"LOCAL_WORLD_SIZE": "64"}, 1),
        ({"LOCAL_WORLD_SIZE": "0"}, 16),
        ({"LOCAL_WORLD_SIZE": "many"}, 16),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        ({"MPI_LOCALNRANKS": "2"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "4"}, 16),  # a batch script, no step
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4"}, 4),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(x2),8", "SLURM_NODEID": "1"}, 4),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(x2),8", "SLURM_NODEID": "2"}, 2),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(x2),8", "SLURM_NODEID": "3"}, 16),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "four"}, 16),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_CPUS_PER_TASK": "6"}, 6),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_CPUS_PER_TASK": "32"}, 16),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_CPUS_PER_TASK": "12", "LOCAL_WORLD_SIZE": "4"}, 3),
    ],
)
def test_the_cores_of_a_rank_are_what_its_launcher_gives_it(environ: dict[str, str], cpus: int) -> None:
    assert cpus_of(16, environ) == cpus


V1 = "12:cpuset:/\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/init"
V2 = "0::/jobs/one"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2.5),
        ({"/proc/self/cgroup": V2, "/sys/fs/cgroup/jobs/one/cpu.max": "400000 100000"}, 4.0),
        (
            {
                "/proc/self/cgroup": V2,
                "/sys/fs/cgroup/jobs/one/cpu.max": "max 100000",
                "/sys/fs/cgroup/jobs/cpu.max": "300000 100000",
                "/sys/fs/cgroup/cpu.max": "800000 100000",
            },
            3.0,
        ),
        ({"/proc/self/cgroup": V2, "/sys/fs/cgroup/jobs/one/cpu.max": ""}, None),
        (
            {
                "/proc/self/cgroup": V1,
                "/sys/fs/cgroup/cpu/docker/abc/cpu.cfs_quota_us": "150000\n",
                "/sys/fs/cgroup/cpu/docker/abc/cpu.cfs_period_us": "100000\n",
            },
            1.5,
        ),
        (
            {
                "/proc/self/cgroup": V1,  # the path is the host's; what is mounted is the container's
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            2.0,
        ),
        (
            {
                "/proc/self/cgroup": V1,
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({"/proc/self/cgroup": "nonsense\n::\n"}, None),
    ],
)
def test_a_control_group_bounds_the_cores_that_can_be_kept_busy(files: dict[str, str], quota: float | None) -> None:
    assert cpu_quota(files.get) == quota


def test_there_is_at_least_one_core_and_no_more_than_the_machine_has() -> None:
    assert 1 <= cpus_here() <= usable_cpus() <= (os.cpu_count() or 1)
