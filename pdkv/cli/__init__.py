"""The `pdkv` command.

Guarantees: a command imports what it needs when it runs, so `pdkv plan` works where neither torch nor nixl nor
transformers is installed; an error of ours ends as one line on stderr and exit code 2.
"""


def main() -> None:
    """Entry point of the installed command."""
    import signal

    from pdkv.cli.signals import end_at_once

    end_at_once(signal.SIGTERM)
    from pdkv.cli.app import run

    run()
