"""Rows of files, answered exactly once: `weft batch`, and the batches of the server.

rows.py      a line of the input, and the line that answers it
inputs.py    the files that are read
journal.py   what is done: the output's groups of lines, and the state that counts them
job.py       one run over the rows that are left
local.py     the routes of the HTTP API, without a socket
command.py   `weft batch`
"""
