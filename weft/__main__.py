"""`python -m weft` is the `weft` command."""

from weft.serving.cli import main

main()
