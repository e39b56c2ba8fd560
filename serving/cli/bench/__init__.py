"""`weft bench`: loads an OpenAI-compatible server the way users do, and reports what they feel.

options.py and command.py are the command line, run.py is one benchmark:
workload.py says what is asked, load.py when, client.py asks and takes the
times, report.py turns the times into numbers, output.py into a table, JSON and
a picture.
"""
