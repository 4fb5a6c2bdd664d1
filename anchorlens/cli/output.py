"""What the commands print: results to the standard output, all else to the standard error."""

import typer

from ..system.process_state import is_main


def say(text: str, err: bool = False) -> None:
    """Print in the main process."""
    if is_main():
        typer.echo(text, err=err)
