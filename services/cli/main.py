"""The ``blink`` command: its parts, and how it ends.

Each command imports what it needs when it runs, so that ``blink --help`` is instant.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated

import typer

from services.cli.bench.options import bench_command
from services.cli.numbers import between
from services.cli.program import ADDRESS_VARIABLE, DEFAULT_ADDRESS, DEFAULT_HTTP_ADDRESS, HTTP_ADDRESS_VARIABLE
from services.common.errors import BlinkError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
models = typer.Typer(help="Fetch and list models.", no_args_is_help=True)
app.add_typer(models, name="model")
keys = typer.Typer(help="API keys for callers of a gateway.", no_args_is_help=True)
app.add_typer(keys, name="key")


def _address(text: str) -> str:
    from services.cli.address import require_target

    return require_target(text)


Address = Annotated[
    str,
    typer.Option(
        "--address",
        envvar=ADDRESS_VARIABLE,
        parser=_address,
        metavar="ADDRESS",
        help="Gateway to talk to: host:port or unix:/path.",
    ),
]
DEFAULT_MAX_TOKENS = 512  # a small model may ramble on for all of its context
MAX_U32 = (1 << 32) - 1
MAX_INTERVAL = 86_400
ModelName = Annotated[str, typer.Argument(help="Name of a known model; `blink model list` shows them.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"blink {version('blink')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Serve large language models with the host CPU off the request path."""


@app.command("up")
def serve(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(help="Known model, .gguf file or Hugging Face folder.", show_default="smollm2-135m-instruct"),
    ] = None,
    engine: Annotated[str | None, typer.Option(help="What runs the model: cpu or cuda.", show_default="cpu")] = None,
    instance: Annotated[
        str | None,
        typer.Option(
            help="Name of this Blink; several run side by side, each with its own --listen and --http.",
            show_default="default",
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            help="Where clients call: host:port (port 0: any free one) or unix:/path.", show_default=DEFAULT_ADDRESS
        ),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            help="Where OpenAI clients and Prometheus call: host:port, unix:/path, or off.",
            show_default=DEFAULT_HTTP_ADDRESS,
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Gateway worker processes.")] = 1,
    sample: Annotated[str | None, typer.Option(help="Stream the answer to this prompt once everything serves.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every event of every process.")] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other setting: bootstrap.NAME=VALUE or gateway.NAME=VALUE."),
    ] = None,
) -> None:
    """Start an engine and gateways on this machine and serve until Ctrl-C, which drains and stops them."""
    from services.cli.up import UpOptions, up

    up(UpOptions(**{**context.params, "settings": settings or []}))


# Everything after the command's name is the process's own: its flags, its --help.
_PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


@app.command("engine", context_settings=_PASSED_ON, options_metavar="[SETTINGS]")
def run_engine(context: typer.Context) -> None:
    """Run the engine's side alone, for gateways elsewhere (docs/rdma.md); --help lists its settings."""
    from services.cli.side import run_side

    run_side("services.bootstrap", context.args)


@app.command("gateway", context_settings=_PASSED_ON, options_metavar="[SETTINGS]")
def run_gateway(context: typer.Context) -> None:
    """Run one gateway worker alone, for an engine elsewhere (docs/rdma.md); --help lists its settings."""
    from services.cli.side import run_side

    run_side("services.dpu_gateway", context.args)


@app.command("generate")
def generate_text(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    address: Address = DEFAULT_ADDRESS,
    raw: Annotated[bool, typer.Option("--raw", help="Send the bare prompt, without the chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message of the chat.")] = None,
    model: Annotated[str | None, typer.Option(help="Refuse to talk to any other model.")] = None,
    request_id: Annotated[str | None, typer.Option(help="Id for logs and Abort.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default 1.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, max=MAX_U32, help="Keep the k most likely tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the smallest set that reaches this probability.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens below this share of the most likely.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1 discourages tokens seen before.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="Subtracted for tokens generated before.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="Subtracted for each time generated.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=(1 << 64) - 1, help="Repeats a generation.")] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, max=MAX_U32, help="Stop after this many generated tokens.")
    ] = DEFAULT_MAX_TOKENS,
    min_tokens: Annotated[int | None, typer.Option(min=0, max=MAX_U32, help="Do not end before this many.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this string; may be repeated.")] = None,
    stop_token_id: Annotated[list[int] | None, typer.Option(min=0, max=MAX_U32, help="End at this token.")] = None,
    ignore_eos: Annotated[bool | None, typer.Option("--ignore-eos", help="Go on past end-of-sequence.")] = None,
    logprobs: Annotated[int | None, typer.Option(min=0, max=MAX_U32, help="With --json: alternatives a token.")] = None,
    priority: Annotated[int | None, typer.Option(min=-4, max=4, help="Higher goes first.")] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            parser=between(0.001, MAX_U32 / 1000), metavar="SECONDS", help="Cut generation short after this long."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print every event as a line of JSON.")] = False,
) -> None:
    """Stream one generation: a chat when the model has a template. Ctrl-C aborts it."""
    from services.cli.generate import Options, generate

    generate(Options(**context.params))


@app.command("status")
def show_status(
    address: Address = DEFAULT_ADDRESS,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Redraw until Ctrl-C.")] = False,
    interval: Annotated[
        float,
        typer.Option(parser=between(0.1, MAX_INTERVAL), metavar="SECONDS", help="Time between updates of --watch."),
    ] = 1.0,
    json: Annotated[bool, typer.Option("--json", help="Print GetLoad's answer as JSON.")] = False,
) -> None:
    """Show what the engine is doing; fails when the engine or the gateway is dead."""
    from services.cli.status import status

    status(address, watch, interval, json)


@app.command("top")
def show_top(
    http: Annotated[
        str,
        typer.Option(
            envvar=HTTP_ADDRESS_VARIABLE,
            metavar="ADDRESS",
            help="HTTP address of a gateway: host:port, or https://host:port.",
        ),
    ] = DEFAULT_HTTP_ADDRESS,
    interval: Annotated[
        float, typer.Option(parser=between(0.1, MAX_INTERVAL), metavar="SECONDS", help="Time between updates.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show one moment and exit.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each moment.")] = False,
) -> None:
    """Watch engine, lanes, latencies, endings and losses of all workers; Ctrl-C ends it."""
    from services.cli.top.command import top

    top(http, interval, once, json)


app.command("bench")(bench_command)


@app.command("doctor")
def examine_machine(
    transport: Annotated[str, typer.Option(help="How gateways are to reach the engine: shm or verbs.")] = "shm",
    engine: Annotated[str, typer.Option(help="What is to run the model here: cpu, cuda or none.")] = "cpu",
    listen: Annotated[
        str, typer.Option(help="Where gRPC clients are to call here.", show_default=f"{DEFAULT_ADDRESS}, of a gateway")
    ] = "",
    http: Annotated[
        str,
        typer.Option(help="Where HTTP clients are to call here.", show_default=f"{DEFAULT_HTTP_ADDRESS}, of a gateway"),
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check what this machine has for the way Blink is to run on it; fails when something is missing."""
    from services.cli.doctor.doctor import doctor, purpose_of

    doctor(purpose_of(transport, engine, listen, http), as_json=json)


@app.command("tenants")
def show_tenants(
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="Only this namespace's: who may not list all names one.")
    ] = None,
    context: Annotated[str | None, typer.Option(help="Context of the kubeconfig.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the objects as JSON.")] = False,
) -> None:
    """Show a cluster's tenants on freed cores: who runs where, the SLO's margin, and why one waits."""
    from services.cli.tenants import tenants

    tenants(namespace, context, json)


@models.command("pull")
def model_pull(name: ModelName) -> None:
    """Fetch a model, or check and repair the one that is here. An interrupted pull goes on where it stopped."""
    from services.cli.model import pull

    pull(name)


@models.command("list")
def model_list() -> None:
    """Show the known models and which of them are on this machine."""
    from services.cli.model import show

    show()


@keys.command("new")
def key_new(
    name: Annotated[str, typer.Argument(help="Who gets the key; logs show this name.")],
    requests_per_minute: Annotated[
        float | None, typer.Option(parser=between(0.001, 1e9), metavar="NUMBER", help="Limit over all workers.")
    ] = None,
    tokens_per_minute: Annotated[
        float | None,
        typer.Option(
            parser=between(0.001, 1e12),
            metavar="NUMBER",
            help="Limit of prompts and outputs together, over all workers.",
        ),
    ] = None,
    concurrent_requests: Annotated[
        int | None, typer.Option(min=1, max=65_535, help="Limit of requests under way, over all workers.")
    ] = None,
) -> None:
    """Make a key and print it with the lines for the gateway's key file, which hold its hash alone."""
    from services.cli.key import new

    new(
        name,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        concurrent_requests=concurrent_requests,
    )


def main() -> None:
    """Entry point: a failure is one line on stderr and a non-zero exit code, an interrupt exits with 130."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # its chatter would mix with ours; read when grpc is imported
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as the entry point leaves it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        sys.exit(app(standalone_mode=False))
    except BlinkError as error:
        print(f"blink: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except typer.TyperException as error:
        message = error.format_message()
        if message and "\n" not in message:  # else it is the help of a command that was given nothing
            message = f"blink: {message} (--help shows what is possible)"
        print(message, file=sys.stderr)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output, for example `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
