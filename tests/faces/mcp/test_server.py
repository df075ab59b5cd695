"""The server of ``memest mcp`` with the official client, over stdin and stdout."""

from __future__ import annotations

import json
import os
import sys

import pytest

mcp = pytest.importorskip("mcp")

import anyio

from memest.cli.main import run
from memest.cli.mcp import TOOLS
from support.paths import ROOT

GROWING = ROOT / "tests/support/memory.csv"

OWN_NET = """
import torch
print("noise of a module on stdout", flush=True)
def build():
    return torch.nn.Linear(8, 8), {"input": torch.zeros(4, 8)}, lambda out, batch: out.mean()
"""


def ask(tmp_path, *calls, words=()):
    """What a server says to a client: its tools, and a result or an error for each call."""
    said = []

    async def talk():
        server = mcp.StdioServerParameters(
            command=sys.executable,
            args=["-m", "memest", "mcp", *words],
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            cwd=tmp_path,
        )
        with (tmp_path / "stderr").open("w") as errors:
            async with mcp.Client(mcp.stdio_client(server, errlog=errors)) as client:
                said.append((await client.list_tools()).tools)
                for name, arguments in calls:
                    try:
                        said.append(await client.call_tool(name, arguments))
                    except mcp.MCPError as error:
                        said.append(error)

    anyio.run(talk)
    return said


def printed(capsys, *words):
    run([*words, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_a_client_lists_the_tools_and_calls_each(tmp_path, capsys):
    log = "CUDA out of memory. Tried to allocate 2.00 GiB"
    asked = {"model": "gpt2", "gpu": "t4", "detail": "full"}
    tools, *results = ask(
        tmp_path,
        ("estimate", {**asked, "batch": 8}),
        ("fits", {**asked, "batch": 64}),
        ("max_batch", {**asked, "options": {"fp16": True}}),
        ("advise", {**asked, "effective_batch": 16}),
        ("explain_oom", {"log": log, "detail": "full"}),
        ("explain_growth", {"record": str(GROWING), "detail": "full"}),
    )

    assert [tool.name for tool in tools] == [tool.name for tool in TOOLS]
    assert all(tool.description and tool.annotations.read_only_hint for tool in tools)
    lines = [
        ("estimate", "gpt2", "--gpu", "t4", "--batch", "8"),
        ("fits", "gpt2", "--gpu", "t4", "--batch", "64"),
        ("max-batch", "gpt2", "--gpu", "t4", "--fp16"),
        ("advise", "gpt2", "--gpu", "t4", "-n", "16"),
        ("explain-oom", log),
        ("explain-growth", str(GROWING)),
    ]
    for result, words in zip(results, lines, strict=True):
        assert not result.is_error
        assert result.structured_content == printed(capsys, *words)
        assert json.loads(result.content[0].text) == result.structured_content


def test_errors_are_told_and_the_server_goes_on(tmp_path, capsys):
    wrong = {"model": "gpt2", "gpu": "t4", "options": {"bf17": True}}
    _, refused, unknown, code, after = ask(
        tmp_path,
        ("fits", wrong),
        ("fit", {}),
        ("estimate", {"model": "os:getcwd"}),
        ("fits", {"model": "gpt2", "gpu": "t4", "detail": "full"}),
    )

    assert refused.is_error
    (text,) = refused.content
    assert "Did you mean bf16" in text.text
    assert "Traceback" not in text.text
    error = {"kind": "ConfigError", "message": text.text, "exit_code": 2}
    assert refused.structured_content == {"schema_version": 1, "error": error}
    assert isinstance(unknown, mcp.MCPError)
    assert "Did you mean 'fits'?" in unknown.message
    assert "--run-code" in code.content[0].text
    assert after.structured_content == printed(capsys, "fits", "gpt2", "--gpu", "t4")
    assert "Traceback" not in (tmp_path / "stderr").read_text()


@pytest.mark.slow
def test_code_of_ones_own_runs_where_that_is_allowed_and_its_prints_are_no_protocol(tmp_path):
    (tmp_path / "net.py").write_text(OWN_NET)
    question = {"model": "net:build", "options": {"loop": "plain"}}
    tools, result = ask(tmp_path, ("estimate", question), words=["--run-code"])

    assert not result.is_error, result.content
    assert result.structured_content["model"]["parameters"] == 72
    assert not any(tool.annotations.read_only_hint for tool in tools)
    assert "noise of a module" in (tmp_path / "stderr").read_text()
