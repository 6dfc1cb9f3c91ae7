"""``blink generate``: streams one generation to the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from blink.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from google.protobuf.json_format import MessageToJson

from services.cli.channel import open_channel
from services.cli.errors import CommandError, StoppedError, from_rpc

CALL_SECONDS = 10.0  # for everything but the generation itself
CUT_SHORT = {
    inference_pb2.FINISH_REASON_LENGTH: "--max-tokens or the context's end was reached",
    inference_pb2.FINISH_REASON_TIME_LIMIT: "--time-limit has passed",
}


@dataclass(frozen=True)
class Options:
    """The command's options; None leaves a field unset, so that the gateway's default holds."""

    prompt: str
    address: str
    raw: bool = False
    system: str | None = None
    model: str | None = None
    request_id: str | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Sequence[str] | None = None
    stop_token_id: Sequence[int] | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None
    priority: int | None = None
    time_limit: float | None = None
    json: bool = False


def generate(options: Options) -> None:
    """Run the command. Raises CommandError; an interrupt cancels the generation and becomes a StoppedError."""
    prompt = _read_prompt() if options.prompt == "-" else options.prompt
    output = _Output(options.json)
    with open_channel(options.address) as channel:
        call = _start(channel, options, prompt)
        try:
            for response in call:
                output.show(response)
        except grpc.RpcError as error:
            raise from_rpc(error, options.address) from error
        except KeyboardInterrupt:
            call.cancel()
            tokens = "1 token" if output.tokens == 1 else f"{output.tokens} tokens"
            raise StoppedError(f"aborted after {tokens}") from None
        finally:
            output.end_line()
    if sys.stderr.isatty() and not options.json:
        print(output.summary, file=sys.stderr)
    elif output.cut_short:
        print(f"blink: {output.cut_short}", file=sys.stderr)


class TextStream:
    """One greedy answer as text, for ``blink up --sample``."""

    def __init__(self, address: str, prompt: str, max_tokens: int) -> None:
        self._options = Options(prompt, address, temperature=0.0, max_tokens=max_tokens)
        self._channel = open_channel(address)

    def run(self, write: Callable[[str], object]) -> None:
        """Pass on the text as it comes. Raises CommandError, also after ``close`` from another thread."""
        try:
            for response in _start(self._channel, self._options, self._options.prompt):
                write(_text(response))
        except grpc.RpcError as error:
            raise from_rpc(error, self._options.address) from error
        except ValueError as error:  # the channel was closed before the call began
            raise CommandError(str(error)) from error
        finally:
            self._channel.close()

    def close(self) -> None:
        """End the answer now."""
        self._channel.close()


def build_request(options: Options, prompt: str, chat: bool) -> inference_pb2.GenerateRequest:
    """The request for the options; raises CommandError when one has no place in it or two contradict each other."""
    if options.system is not None and not chat:
        raise CommandError("--system needs a chat template: the model has none, or --raw was given")
    request = inference_pb2.GenerateRequest()
    with _naming("prompt"):
        if chat:
            request.chat.messages.add(role="user", content=prompt)
        else:
            request.text = prompt
    if options.system is not None:
        with _naming("--system"):
            request.chat.messages.insert(0, inference_pb2.ChatMessage(role="system", content=options.system))
    sampling = ("temperature", "top_k", "top_p", "min_p", "seed")
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    _set(request, options, "request_id", "model", "logprobs", "priority")
    _set(request.sampling, options, *sampling, *penalties)
    _set(request.stop, options, "max_tokens", "min_tokens", "ignore_eos")
    if options.stop:
        with _naming("--stop"):
            request.stop.strings.extend(options.stop)
    if options.stop_token_id:
        with _naming("--stop-token-id"):
            request.stop.token_ids.extend(options.stop_token_id)
    if options.time_limit is not None:
        with _naming("--time-limit"):
            request.time_limit.FromNanoseconds(round(options.time_limit * 1e9))
    return request


def _read_prompt() -> str:
    """All of standard input. Raises CommandError when it is no text, as a prompt with replaced bytes is another one."""
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise CommandError(
            f"standard input is not valid UTF-8: byte {error.start} is 0x{error.object[error.start]:02X}"
        ) from error


def _set(message: Any, options: Options, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None:
            with _naming("--" + name.replace("_", "-")):
                setattr(message, name, value)


@contextmanager
def _naming(option: str) -> Iterator[None]:
    """Turn the refusal of a value by its field, whatever the value is, into a CommandError that names the option."""
    try:
        yield
    except UnicodeError as error:
        raise CommandError(f"{option} is not valid UTF-8") from error
    except (ValueError, OverflowError, TypeError) as error:
        raise CommandError(f"{option}: {error}") from error


def _start(channel: grpc.Channel, options: Options, prompt: str) -> Any:
    """Begin the call, as a chat unless asked not to or the model has no template."""
    chat = not options.raw
    if chat:
        try:
            info = control_pb2_grpc.ControlStub(channel).GetModelInfo(
                control_pb2.GetModelInfoRequest(), timeout=CALL_SECONDS
            )
        except grpc.RpcError as error:
            raise from_rpc(error, options.address) from error
        chat = info.has_chat_template
    return inference_pb2_grpc.InferenceStub(channel).Generate(build_request(options, prompt, chat))


def _text(response: inference_pb2.GenerateResponse) -> str:
    return response.finished.text if response.WhichOneof("event") == "finished" else response.chunk.text


class _Output:
    """Prints a stream's events and remembers what there is to say about it."""

    def __init__(self, as_json: bool) -> None:
        self.tokens = 0
        self.summary = ""
        self.cut_short = ""  # why, when a limit ended the text
        self._as_json = as_json
        self._started = time.perf_counter()
        self._first: float | None = None
        self._line_is_open = False

    def show(self, response: inference_pb2.GenerateResponse) -> None:
        if response.WhichOneof("event") == "chunk":
            self.tokens += len(response.chunk.token_ids)
            self._first = self._first or time.perf_counter()
        if response.WhichOneof("event") == "finished":
            now = time.perf_counter()
            first = self._first or now
            self.summary = _summary(response.finished, first - self._started, now - first)
            if response.finished.reason in CUT_SHORT:
                self.cut_short = f"cut short: {CUT_SHORT[response.finished.reason]}"
        if self._as_json:
            print(MessageToJson(response, indent=None, preserving_proto_field_name=True), flush=True)
        elif text := _text(response):
            sys.stdout.write(text)
            sys.stdout.flush()
            self._line_is_open = True

    def end_line(self) -> None:
        """What comes next on the terminal begins a line of its own."""
        if self._line_is_open:
            print(flush=True)
            self._line_is_open = False


def _summary(finished: inference_pb2.Finished, first_seconds: float, rest_seconds: float) -> str:
    usage = finished.usage
    reason = inference_pb2.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower().replace("_", " ")
    rate = (usage.completion_tokens - 1) / rest_seconds if usage.completion_tokens > 1 and rest_seconds else 0.0
    return (
        f"{usage.prompt_tokens} prompt + {usage.completion_tokens} generated tokens, "
        f"first after {first_seconds:.2f} s, then {rate:.1f} tokens/s ({reason})"
    )
