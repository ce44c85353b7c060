"""`python -m pdkv.cli`, where the command is not installed."""

from pdkv.cli import main

main()
