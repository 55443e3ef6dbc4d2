"""The command line's commands, put together."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kogc import __version__
from kogc.cli import compile, demo, explain, export, inspect, machine, run, tune, verify
from kogc.cli.report import report


class _Commands(TyperGroup):
    """Typer answers Ctrl-C without a word and a closed pipe with exit code 1; here they are reported like any other end."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, OSError) as error:
            raise typer.Exit(report(error)) from None


app = typer.Typer(
    name="kogc",
    cls=_Commands,
    help="Compile a PyTorch decoder into one persistent kernel, run it, and look inside.\n\n"
    "A first minute:  kogc demo\n\n"
    "Your own model:  kogc compile model.pt --target cpu   then   kogc run model.kog --prompt 'def fib(n):'",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kogc {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Options before the command."""


for _module in (demo, compile, run, explain, inspect, verify, tune, export, machine):
    _module.register(app)
