"""Entry point for `python -m weft`, which is the `weft` command."""

from weft.serving.cli.main import main

main()
