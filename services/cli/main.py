"""The ``blink`` command: its parts, and how it ends.

Each command imports what it needs when it runs, so that ``blink --help`` is instant.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from services.common.errors import BlinkError

app = typer.Typer(
    help="Serve large language models with the host CPU off the request path.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
models = typer.Typer(help="Fetch and list models.", no_args_is_help=True)
app.add_typer(models, name="model")

ModelName = Annotated[str, typer.Argument(help="Name of a known model; `blink model list` shows them.")]


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


def main() -> None:
    """Entry point: a failure is one line on stderr and a non-zero exit code, an interrupt exits with 130."""
    try:
        app()
    except BlinkError as error:
        print(f"blink: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output, for example `head`, has seen enough
        sys.stderr.close()
        sys.exit(0)


if __name__ == "__main__":
    main()
