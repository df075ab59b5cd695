"""A real bash, in which memest is real and the tools of a cluster are stand-ins."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.fixture
def bash(tmp_path):
    """Run a script with the real memest and stand-ins for the tools of a cluster."""
    pytest.importorskip("transformers")
    tools = tmp_path / "bin"
    tools.mkdir()

    def tool(name, body):
        path = tools / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    tool("memest", f'exec "{sys.executable}" -P -m memest "$@"')
    tool("python", f'exec "{sys.executable}" "$@"')
    tool("scancel", f'echo "$@" >> "{tmp_path}/cancelled"')

    def run(*command, gpu=None, cwd=tmp_path, **env):
        if gpu is not None:
            tool("nvidia-smi", f'echo "{gpu}"')
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "MEMEST_FITS"))}
        return subprocess.run(
            ["bash", *command], capture_output=True, text=True, check=False, timeout=300,
            cwd=cwd, stdin=subprocess.DEVNULL,
            env=kept | {"PATH": f"{tools}:/usr/bin:/bin", "HF_HUB_OFFLINE": "1"} | env,
        )  # fmt: skip

    run.tmp_path, run.tool = tmp_path, tool
    return run
