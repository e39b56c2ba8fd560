"""`python -m weft` is the `weft` command."""

from weft.serving.cli.main import main

main()
