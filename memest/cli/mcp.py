"""``memest mcp``: the commands as tools of the Model Context Protocol, on stdin and stdout.

A tool is a command: its options are checked by the same table, its results are the documents of
``--json``, in brief unless all is asked for, and its errors are the command's paragraphs.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import memest
from memest.cli.advise import advise
from memest.cli.console import Output, emit
from memest.cli.estimate import estimate, fits
from memest.cli.explain_growth import explain_growth
from memest.cli.explain_oom import explain_oom
from memest.cli.failures import error_document, explain
from memest.cli.flags import debuggable, switch
from memest.cli.max_batch import max_batch
from memest.cli.mcp_brief import brief
from memest.config.option import Kind, Option
from memest.config.option_table import OPTIONS
from memest.config.options import find_option, read_bool
from memest.config.own_code import NO_OWN_CODE
from memest.config.packages import Need
from memest.errors import ConfigError, not_legal

__all__ = ["mcp"]

_MCP = Need(
    "mcp",
    "The server needs the package mcp, which is not installed: pip install 'memest-gpu[mcp]'.",
    since=(2, 3),
)
_RUNS_NONE = (
    "This server runs none: ask on the command line (memest estimate), or start it as memest mcp "
    "--run-code."
)
_RUN_OF = "batch", "seq_len"
"""Options that are inputs of their own, besides the GPU."""

_Schema = dict[str, Any]
_TEXT: _Schema = {"type": "string"}
_WHOLE: _Schema = {"type": "integer"}
_SWITCH: _Schema = {"type": "boolean"}
_TEXTS: _Schema = {"type": ["string", "array"], "items": {"type": "string"}}
_OBJECT: _Schema = {"type": "object"}
_PYTHON_TYPES: dict[str, type] = {
    "string": str,
    "integer": int,
    "boolean": bool,
    "array": list,
    "object": dict,
}


@dataclass(frozen=True, slots=True)
class Tool:
    """A command that a client may call.

    Attributes:
        command: which answers.
        purpose: for whoever chooses among tools.
        inputs: schemas of the command's own parameters, by name.
        required: inputs that a call cannot do without.
    """

    command: Callable[..., int]
    purpose: str
    inputs: Mapping[str, _Schema] = field(default_factory=dict)
    required: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of the command, as Python writes it."""
        return self.command.__name__

    def schema(self) -> _Schema:
        """The inputs as a client sees them, in the words of the command's own help."""
        parameters = inspect.signature(self.command).parameters
        properties = {
            name: {**schema, "description": parameters[name].annotation.__metadata__[0].help}
            for name, schema in {**self.inputs, **_SHARED}.items()
            if name in parameters
        }
        properties["options"] = {**_OBJECT, "description": _OPTIONS_HELP}
        properties["detail"] = {**_TEXT, "enum": list(_DETAILS), "description": _DETAIL_HELP}
        return {
            "type": "object",
            "properties": properties,
            "required": list(self.required),
            "additionalProperties": False,
        }


_SHARED: dict[str, _Schema] = {
    "model": _TEXT,
    "gpu": _TEXTS,
    **dict.fromkeys(_RUN_OF, _WHOLE),
    "config": _TEXTS,
    "launch": _TEXT,
}
"""Inputs of every tool."""
_OPTIONS_HELP = (
    "Further options of the run by name, for example {bf16: true, grad_accum: 4, optim: "
    "adamw_bnb_8bit, checkpointing: full, lora_r: 16, num_gpus: 8, fsdp: full_shard}: those of "
    "`memest estimate --help`, of which the names are those of Hugging Face's TrainingArguments. A "
    "name or value that cannot be is refused."
)
_DETAILS = ("brief", "full")
_DETAIL_HELP = (
    "brief (default): the answer, without layers, timeline and what is a default; full: all that "
    "the command prints with --json, 45 kB and more for an estimate."
)
_MODEL = "Name the model, a configuration file or a launch command."

TOOLS = (
    Tool(
        estimate,
        "Predict the GPU memory of a PyTorch training run without running it: peaks, what fills "
        f"them, whether it fits the GPUs named, the largest batch. {_MODEL}",
    ),
    Tool(
        fits,
        "Whether a training run fits a GPU, or a budget: verdict is fits, tight, fits by "
        "releasing cache, does not fit or cannot say. Each GPU named and the budget stand in "
        "limits: what is free, required (and its range), margin, verdict, reason, a sentence. "
        f"{_MODEL} Name a GPU, gpu_memory under options, or fail_over.",
        {"fail_over": _TEXT},
    ),
    Tool(
        max_batch,
        "The largest batch, sequence length or image size that fits a GPU, and memory over sizes. "
        f"{_MODEL} Name a GPU.",
        {"of": _TEXT, "effective_batch": _WHOLE},
    ),
    Tool(
        advise,
        "Ways to train with a number of samples for each optimizer step on a GPU: those that fit, "
        f"the fastest first. {_MODEL} Name a GPU.",
        {"effective_batch": _WHOLE, "any_precision": _SWITCH},
        ("effective_batch",),
    ),
    Tool(
        explain_oom,
        "Explain PyTorch's out-of-memory message: whose memory it was, whether fragmentation is to "
        "blame; with model and options of the run, where it stopped and what would have fitted.",
        {"log": _TEXT},
        ("log",),
    ),
    Tool(
        explain_growth,
        "Explain memory that grows over a run: what is kept, by which code, what is no leak; with "
        "model and options of the run beside what is expected.",
        {"record": _TEXT},
        ("record",),
    ),
)
_BY_NAME = {tool.name: tool for tool in TOOLS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept(Output):
    """Keeps an answer for a client in place of writing it.

    Attributes:
        documents: the answers.
        notes: what the command line says besides, on stderr.
    """

    as_json: bool = True
    documents: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def document(self, document: dict[str, Any]) -> None:
        """Keep the document of an answer."""
        self.documents.append(document)

    def note(self, text: str) -> None:
        """Keep what an answer leaves out."""
        self.notes.append(text)


def answer(name: str, arguments: Mapping[str, Any]) -> Kept:
    """What a tool answers.

    Args:
        name: of the tool.
        arguments: as a client sent them.

    Raises:
        MemestError: with one paragraph that says what to do.
    """
    tool = _BY_NAME[name]
    values, off = _parameters(tool, arguments)
    detail = values.pop("detail", _DETAILS[0])
    if detail not in _DETAILS:
        raise not_legal(f"detail {detail!r}", detail, _DETAILS)
    kept = Kept()
    tool.command(**values, switched_off=off, output=kept)
    if detail == _DETAILS[0]:
        kept.documents[:] = map(brief, kept.documents)
    return kept


def _parameters(tool: Tool, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Parameters of the command, and switches that are named with false."""
    legal = tool.schema()["properties"]
    values: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for name, value in arguments.items():
        if name not in legal:
            raise _no_input(tool, name, legal)
        read = _typed(name, value, legal[name])
        if name == "options":
            _add(options, read)
        elif name in ("gpu", *_RUN_OF):
            _add(options, {name: read})
        else:
            values[name] = read
    for name in tool.required:
        if name not in values:
            raise ConfigError(f"{tool.name} needs {name}: {legal[name]['description']}")
    if values.get("log") == "-":
        raise ConfigError("log '-' is standard input, which a server has not: send the message.")
    off = [name for name, value in options.items() if value is False]
    return {**values, **{k: v for k, v in options.items() if v is not False}}, off


def _no_input(tool: Tool, name: str, legal: Mapping[str, Any]) -> ConfigError:
    try:
        option = find_option(name)
    except ConfigError:
        return not_legal(f"the input {name!r}", name, legal, state=f"is none of {tool.name}")
    return ConfigError(
        f"{name!r} is an option of the run: it belongs into options, "
        f'{{"options": {{"{option.name}": ...}}}}.'
    )


def _typed(name: str, value: Any, schema: _Schema) -> Any:
    """A value of the type that its input has; some clients send objects and lists as text."""
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if isinstance(value, str) and "string" not in types:
        try:
            value = json.loads(value)
        except ValueError:
            value = str(value)
    fits_type = any(isinstance(value, _PYTHON_TYPES[each]) for each in types)
    if not fits_type or (isinstance(value, bool) and "boolean" not in types):
        raise ConfigError(f"{name} {value!r} is no {' and no '.join(types)}.")
    if name == "config" and isinstance(value, str):
        return [value]
    if name == "effective_batch":
        return str(value)  # the command reads it, and says more
    return value


def _add(options: dict[str, Any], named: Mapping[str, Any]) -> None:
    """Options by their own names, each once, as words of a command line."""
    for name, value in named.items():
        option = find_option(name)
        if option.name in options:
            raise ConfigError(f"{option.name} is named twice, the second time as {name!r}.")
        options[option.name] = _words(option, name, value)


def _words(option: Option, name: str, value: Any) -> Any:
    """A value as the command line has it; False for a switch that is off."""
    if value is None:
        raise ConfigError(f"{name} is null, which says nothing: give a value, or leave it out.")
    if option.kind is Kind.SWITCH:
        return read_bool(option.flags[0], value)
    if option.kind is Kind.EITHER:
        return "true" if read_bool(option.flags[0], value) else "false"
    if option.kind is Kind.MODE and isinstance(value, bool):
        return "full" if value else "none"
    if option.kind is Kind.LIST:
        if isinstance(value, dict):
            raise ConfigError(f"{name} {value!r} is an object: give a list of texts.")
        return [str(each) for each in value] if isinstance(value, list) else [str(value)]
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)


def _instructions() -> str:
    names = ", ".join(option.name for option in OPTIONS)
    return (
        "memest predicts the GPU memory of PyTorch training runs. Files are looked for in "
        f"{os.getcwd()}. Sizes in results are bytes; detail full tells all. "  # noqa: PTH109
        f"Names under options: {names}."
    )


def _server(*, run_code: bool) -> Any:
    """The tools as a server of the official package."""
    import anyio
    import mcp.types as types
    from mcp import MCPError
    from mcp.server import Server

    one_at_a_time = anyio.CapacityLimiter(1)  # what a question changes is the process's

    async def list_tools(_: Any, __: Any) -> Any:
        return types.ListToolsResult(
            tools=[
                types.Tool(
                    name=tool.name,
                    description=tool.purpose,
                    input_schema=tool.schema(),
                    output_schema={"type": "object"},
                    annotations=types.ToolAnnotations(read_only_hint=not run_code),
                )
                for tool in TOOLS
            ]
        )

    async def call_tool(_: Any, params: Any) -> Any:
        if params.name not in _BY_NAME:
            error = not_legal(
                "the tool", params.name, _BY_NAME, state=f"{params.name!r} is not known"
            )
            raise MCPError(types.INVALID_PARAMS, str(error))
        work = partial(_result, types, params.name, params.arguments or {})
        return await anyio.to_thread.run_sync(work, limiter=one_at_a_time)

    return Server(
        "memest",
        version=memest.__version__,
        instructions=_instructions(),
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def _result(types: Any, name: str, arguments: Mapping[str, Any]) -> Any:
    """An answer, or an error, as the protocol has it."""
    try:
        kept = answer(name, arguments)
    except Exception as error:  # noqa: BLE001 - the last stop: every error gets its paragraph
        kind, message, code = explain(error)
        return types.CallToolResult(
            content=[types.TextContent(type="text", text=message)],
            structured_content=error_document(kind, message, code),
            is_error=True,
        )
    (document,) = kept.documents
    texts = [json.dumps(document), *kept.notes]
    return types.CallToolResult(
        content=[types.TextContent(type="text", text=text) for text in texts],
        structured_content=document,
    )


def _serve(*, run_code: bool) -> None:
    """Answer until the client closes stdin."""
    import anyio
    from mcp.server.stdio import stdio_server

    async def serve() -> None:
        server = _server(run_code=run_code)
        async with stdio_server() as (requests, replies):
            await server.run(requests, replies, server.create_initialization_options())

    anyio.run(serve)


@debuggable
def mcp(
    *,
    run_code: Annotated[
        bool,
        switch(
            "--run-code",
            "Import and run code that a question names: package.module:factory, --step, --loss, "
            "--trust-remote-code. Otherwise such questions are refused.",
        ),
    ] = False,
) -> int:
    """Serve estimates to AI assistants: a server of the Model Context Protocol on stdin and stdout.

    The client starts it. For example: claude mcp add memest -- memest mcp
    """
    _MCP.check()
    if not run_code:
        os.environ[NO_OWN_CODE] = _RUNS_NONE
    gc.set_threshold(700, 10, 10)  # Python's own: this process stays, where other commands end soon
    if sys.stdin is not None and sys.stdin.isatty():
        emit(
            "memest: serving the Model Context Protocol on stdin and stdout, for a client that "
            "starts this command; Ctrl-C ends it."
        )
    _serve(run_code=run_code)
    return 0
