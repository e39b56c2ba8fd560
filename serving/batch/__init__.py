"""Rows of files, answered exactly once: `weft batch`, and the batches of the server.

rows.py      a line of the input, and the line that answers it
inputs.py    the files that are read
database.py  a SQLite file of one process
journal.py   what is done: the output's groups of lines, and the state that counts them
job.py       one run over the rows that are left
local.py     the routes of the HTTP API, without a socket
command.py   `weft batch`
objects.py   files and batches as OpenAI's API has them
store.py     those of a server, on its disk
service.py   the server's batches, run beside its other requests
"""
