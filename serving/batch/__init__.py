"""Rows of files, answered exactly once: `weft batch`, and the batches of the server.

rows.py        a line of the input, and the line that answers it
inputs.py      the files that are read
faults.py      what goes wrong on a disk
database.py    a SQLite file of one process
journal.py     what is done: the output's groups of lines, and the state that counts them
writer.py      answers, to the journal
job.py         one run over the rows that are left
local.py       the routes of the HTTP API, without a socket
feeder.py      rows, as the engine has room for what they ask for
command.py     `weft batch`
objects.py     files and batches as OpenAI's API has them
store.py       those of a server, on its disk
validation.py  whether an input can be run
records.py     what a batch has on the disk, and how it ends
runner.py      one batch after the other, answered
service.py     the server's batches
"""
