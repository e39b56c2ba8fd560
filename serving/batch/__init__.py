"""Batches: files of requests, each answered exactly once.

Both `weft batch` (serving/cli/batch.py) and the batch API of the server use these modules:

    files.py       read input files; parse their lines, and make output lines
    job.py         run the rows that have no answer yet, as fast as the engine admits them
    journal.py     append answers to the output files, and record which rows are done
    database.py    a SQLite file for one process, and the errors that disks cause
    objects.py     files and batches, as OpenAI's API defines them
    storage.py     store a server's files and batches on its disk
    service.py     the server's batches: validate, run, cancel and end them
"""
