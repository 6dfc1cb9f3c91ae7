"""The options of ``blink bench``, checked; what they need is imported once they are."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.bench.kinds import Arrivals, Prompts, Protocol
from services.cli.numbers import between
from services.cli.program import ADDRESS_VARIABLE, DEFAULT_ADDRESS

if TYPE_CHECKING:
    from services.cli.bench.workload import Workload

MAX_RATE = 1e5
MAX_SECONDS = 86_400.0


class Api(StrEnum):
    """OpenAI's two ways to ask for text."""

    COMPLETIONS = "completions"
    CHAT = "chat"


Rate = Annotated[
    list[float] | None,
    typer.Option(
        "--rate", parser=between(1e-3, MAX_RATE), metavar="NUMBER", help="Requests a second; repeat it for a sweep."
    ),
]
Seconds = Annotated[
    float, typer.Option(parser=between(0.1, MAX_SECONDS), metavar="NUMBER", help="Of arrivals, each repeat.")
]
Limit = Annotated[float | None, typer.Option(parser=between(1e-3, 1e7), metavar="MS")]


def bench_command(
    address: Annotated[
        str, typer.Option(envvar=ADDRESS_VARIABLE, help="Blink to measure by gRPC: host:port or unix:/path.")
    ] = DEFAULT_ADDRESS,
    openai: Annotated[
        str | None, typer.Option(metavar="URL", help="Measure an OpenAI API instead: http://HOST:PORT/v1.")
    ] = None,
    api: Annotated[Api, typer.Option(help="With --openai: which of its calls.")] = Api.COMPLETIONS,
    model: Annotated[str | None, typer.Option(help="With --openai: default the first that it lists.")] = None,
    rate: Rate = None,
    arrivals: Annotated[Arrivals, typer.Option(help="How requests are spaced.")] = Arrivals.POISSON,
    burst_shape: Annotated[
        float,
        typer.Option(parser=between(0.01, 1.0), metavar="NUMBER", help="Gamma shape of bursty gaps; 1 is Poisson."),
    ] = 0.25,
    prompt_tokens: Annotated[
        str, typer.Option(metavar="LENGTHS", help="N, uniform:LOW:HIGH, lognormal:MU:SIGMA[:LOW:HIGH] or sharegpt.")
    ] = "sharegpt",
    output_tokens: Annotated[str, typer.Option(metavar="LENGTHS", help="The same for outputs.")] = "sharegpt",
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Replay a JSONL trace instead; --rate is its speed, default 1.")
    ] = None,
    seconds: Seconds = 30.0,
    warm_up: Annotated[
        float, typer.Option(parser=between(0, MAX_SECONDS), metavar="SECONDS", help="Of load before anything counts.")
    ] = 5.0,
    repeats: Annotated[int, typer.Option(min=1, max=100, help="Of each load; two or more give intervals.")] = 3,
    seed: Annotated[int, typer.Option(min=0, max=1 << 31, help="Repeats the same load.")] = 0,
    slo_ttft: Limit = None,
    slo_tpot: Limit = None,
    search: Annotated[
        bool, typer.Option("--search", help="Find the highest rate that keeps the SLO, from the first --rate on.")
    ] = False,
    slo_goal: Annotated[
        float, typer.Option(parser=between(0.01, 1), metavar="SHARE", help="Of requests that must keep the SLO.")
    ] = 0.95,
    precision: Annotated[
        float, typer.Option(parser=between(0.001, 0.5), metavar="SHARE", help="Of the rate that --search finds.")
    ] = 0.05,
    prompts: Annotated[
        Prompts | None, typer.Option(help="What prompts are made of.", show_default="ids, for a chat text")
    ] = None,
    vocabulary: Annotated[
        int, typer.Option(min=2, max=1 << 20, help="With --openai: ids of prompts are below it.")
    ] = 30_000,
    temperature: Annotated[float, typer.Option(parser=between(0, 100), metavar="NUMBER", help="0 is greedy.")] = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option(help="Make outputs as long as asked; some OpenAI servers refuse it.")
    ] = True,
    timeout: Annotated[
        float, typer.Option(parser=between(0.1, MAX_SECONDS), metavar="SECONDS", help="For each request.")
    ] = 600.0,
    processes: Annotated[
        int | None, typer.Option(min=1, max=256, help="Of the load generator.", show_default="half of its CPUs")
    ] = None,
    cpus: Annotated[
        str | None, typer.Option(metavar="LIST", help="Of the load generator, such as 0-3.", show_default="all")
    ] = None,
    max_lateness: Annotated[
        float,
        typer.Option(parser=between(0.1, 1e4), metavar="MS", help="p99 from which on the load generator is too slow."),
    ] = 10.0,
    pid: Annotated[
        list[int] | None, typer.Option(min=1, help="Whose CPU time counts, with descendants; may be repeated.")
    ] = None,
    gpu: Annotated[list[int] | None, typer.Option(min=0, help="Whose energy counts; may be repeated.")] = None,
    interfere: Annotated[int, typer.Option(min=0, max=4096, help="Run so many memory-hostile neighbours.")] = 0,
    interfere_cpus: Annotated[
        str | None, typer.Option(metavar="LIST", help="Of the neighbours.", show_default="all but --cpus")
    ] = None,
    label: Annotated[str, typer.Option(help="Name of what is measured.", show_default="the model")] = "",
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write bench.json, bench.md and plots there.")
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of bench.json and exit.")] = False,
) -> None:
    """Measure Blink or an OpenAI-compatible server under load: latencies, throughput, goodput (docs/bench.md)."""
    import json

    from services.cli.bench.command import Plan, bench
    from services.cli.bench.placement import place
    from services.cli.bench.report import Report, Slo
    from services.cli.bench.resolve import resolve_grpc, resolve_openai
    from services.cli.errors import CommandError

    if schema:
        print(json.dumps(Report.model_json_schema(), indent=2))
        return
    slo = None if slo_ttft is None and slo_tpot is None else Slo(ttft_ms=slo_ttft, tpot_ms=slo_tpot)
    if search and slo is None:
        raise CommandError("--search needs --slo-ttft or --slo-tpot: what must hold at a serviceable load")
    if search and trace is not None:
        raise CommandError("--search varies a rate, which a --trace does not have")
    workload, words = _workload(trace, arrivals, burst_shape, prompt_tokens, output_tokens, seconds)
    placement = place(cpus, interfere_cpus, interfere, processes)
    chosen = prompts or (Prompts.TEXT if openai and api is Api.CHAT else Prompts.IDS)
    asking = {"prompts": chosen, "temperature": temperature, "ignore_eos": ignore_eos, "timeout": timeout}
    if openai is None:
        target = resolve_grpc(address, **asking)
    else:
        target = resolve_openai(openai, Protocol(api.value), model, vocabulary, **asking)
    bench(
        Plan(
            target=target,
            workload=workload,
            workload_words=words,
            loads=rate or [1.0],
            repeats=repeats,
            warm_up=warm_up,
            seed=seed,
            slo=slo,
            search=search,
            slo_goal=slo_goal,
            precision=precision,
            processes=placement.processes,
            cpus=placement.cpus,
            max_lateness=max_lateness / 1e3,
            pids=tuple(pid or ()),
            gpus=tuple(gpu or ()),
            interfere=interfere,
            interfere_cpus=placement.neighbours,
            label=label,
            output=output,
        )
    )


def _workload(
    trace: Path | None, arrivals: Arrivals, burst_shape: float, prompts: str, outputs: str, seconds: float
) -> tuple[Workload, str]:
    """The workload and what it is in words. Raises CommandError."""
    from services.cli.bench.lengths import SHAREGPT_OUTPUT, SHAREGPT_PROMPT, parse_lengths
    from services.cli.bench.workload import Synthetic, Trace
    from services.cli.errors import CommandError

    if trace is not None:
        return Trace.read(trace), f"trace {trace.name}, load is its speed"
    try:
        lengths = parse_lengths(prompts, SHAREGPT_PROMPT), parse_lengths(outputs, SHAREGPT_OUTPUT)
    except ValueError as error:
        raise CommandError(str(error)) from error
    kind = f"bursty (shape {burst_shape:g})" if arrivals is Arrivals.BURSTY else arrivals.value
    words = f"{kind} arrivals for {seconds:g} s, prompts of {prompts}, outputs of {outputs} tokens"
    return Synthetic(arrivals, burst_shape, *lengths, seconds), words
